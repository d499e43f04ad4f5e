"""Rank the abstracts of bench_ranking.py by P(yes) instead: can the model say if a topic fits?

The last line is one JSON object: AUC and nDCG@10 of each prompt.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ranking_data
import report
from ranking_metrics import auc, ndcg
from rich.console import Console
from rich.progress import track
from served import Served

from stemserve.service.bench.server_process import serving
from stemserve.service.default_model import fetch_default

CACHE = Path(__file__).parent.parent / ".cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    name: str
    document: str  # the shared prefix
    question: str
    labels: tuple[str, str]  # yes, no


QUESTION = "Is this paper about {query}? Answer yes or no."
PROMPTS = (
    Prompt(
        name="plain",
        document="Abstract: {document}\n",
        question=f"{QUESTION}\nAnswer:",
        labels=(" yes", " no"),
    ),
    Prompt(
        name="short",
        document="Abstract: {document}\n",
        question="Topic: {query}. Relevant (yes or no):",
        labels=(" yes", " no"),
    ),
    Prompt(
        name="chat",
        document="<|im_start|>user\nAbstract: {document}\n",
        question=f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
        labels=("Yes", "No"),
    ),
)


def judge(
    task: ranking_data.RankingTask, served: Served, prompt: Prompt, console: Console
) -> dict[str, float]:
    scores = np.empty(task.relevant.shape)
    masses = np.empty(task.relevant.shape)
    questions = [prompt.question.format(query=query) for query in task.queries]
    documents = track(task.documents, prompt.name, console=console, transient=True)
    for number, document in enumerate(documents):
        answer = served.choose(questions, prompt.labels, prompt.document.format(document=document))
        scores[:, number] = answer.scores[:, 0] / answer.scores.sum(axis=1)
        masses[:, number] = answer.label_mass
    return {
        "auc": round(auc(scores, task.relevant), 3),
        "ndcg_at_10": round(ndcg(scores, task.relevant), 3),
        "mean_label_mass": round(float(masses.mean()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write a result file with machine facts")
    options = parser.parse_args()
    console = Console(stderr=True)
    task = ranking_data.load(ranking_data.fetch(CACHE / "ranking"))
    model = fetch_default(CACHE / "models", progress=console.print)
    server = ["--model", str(model), "--threads", str(options.threads), "--dtype", "float32"]
    with (
        tempfile.TemporaryDirectory() as logs,
        serving(server, log=Path(logs) / "server.log") as address,
        Served(address) as served,
    ):
        results = {prompt.name: judge(task, served, prompt, console) for prompt in PROMPTS}
    if options.output:
        command = shlex.join(["make", "bench-yes-no", f"ARGS={shlex.join(sys.argv[1:])}"])
        report.write(options.output, command=command, threads=options.threads, results=results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
