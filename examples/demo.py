"""Start a real server and show what a shared prefix does for ranking and sampling.

Run it with `make demo`.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.progress import track
from rich.table import Table
from rich.text import Text

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import Client, Scores, Usage

T = TypeVar("T")

TEXTS = json.loads((Path(__file__).parent / "documents.json").read_text())
STOP_TIMEOUT_S = 30.0
TOLERANCE = 1e-3  # of a sum over a query's tokens

WIDTH = 108

console = Console(highlight=False)
console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH


@dataclass(frozen=True, kw_only=True)
class Ranking:
    query: str
    scores: np.ndarray  # [documents] log P(query | document)
    usage: Usage
    milliseconds: float


def passage(document: dict[str, str]) -> str:
    return f"Passage: {document['text']}\nA question that this passage answers:"


def chat(text: str) -> str:
    """One user turn in the form that the default model was trained on."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def usage_cells(usage: Usage, milliseconds: float) -> list[str]:
    counts = (usage.cached_tokens, usage.shared_tokens, usage.computed_tokens)
    saved = f"{usage.kv_avoided_bytes / 1e6:,.0f}"
    return [*(f"{count:,}" for count in counts), f"{milliseconds:,.0f}", saved]


def bar(rows: Sequence[T], doing: str) -> Iterable[T]:
    shown = console.is_terminal
    return track(rows, doing, console=console, transient=True, disable=not shown)


TEXT_COLUMNS = ("query", "best two documents", "topic", "review")
USAGE_COLUMNS = ("cached", "shared", "computed", "ms", "KV MB saved")


def table(title: str, columns: Sequence[str]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    return made


@contextmanager
def running_server(model: str) -> Generator[str]:
    """A server on free ports; yields HOST:PORT of gRPC. RuntimeError if it does not start."""
    command = [str(Path(sys.executable).with_name("stemserve")), "serve", "--model", model]
    command += ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
    command += ["--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with console.status("starting the server and loading the model"):
            line = server.stdout.readline() if server.stdout is not None else ""
        if "gRPC " not in line:
            raise RuntimeError(f"the server did not start (exit code {server.wait()})")
        yield line.partition("gRPC ")[2].partition(",")[0]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(STOP_TIMEOUT_S)


async def timed(call: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    answer = await call
    return answer, (time.perf_counter() - start) * 1e3


async def rank_documents(client: Client) -> list[Ranking]:
    """One Score call a query over all registered documents."""
    documents = TEXTS["documents"]
    prefix_ids: list[str] = []
    for document in bar(documents, "registering documents"):
        request = prefixes_pb2.RegisterRequest(text=passage(document))
        prefix_ids.append((await client.register(request)).prefix_id)
    rankings: list[Ranking] = []
    for query in bar(TEXTS["queries"], "ranking documents"):
        scores, milliseconds = await timed(client.rank(f" {query}", prefix_ids))
        rankings.append(
            Ranking(
                query=query, scores=scores.scores, usage=scores.usage, milliseconds=milliseconds
            )
        )
    shown = table(
        f"{len(documents)} documents ranked by log P(query | document), one call a query",
        ("query", "best two documents", *USAGE_COLUMNS),
    )
    for ranking in rankings:
        best = np.argsort(-ranking.scores)[:2]
        names = "\n".join(f"{documents[i]['title']} {ranking.scores[i]:.1f}" for i in best)
        shown.add_row(ranking.query, names, *usage_cells(ranking.usage, ranking.milliseconds))
    console.print(shown)
    console.print(
        "Tokens are cached (of an earlier call or step), shared (inside this call) or computed.\n"
        "The first call computes the documents; the later ones find them, and compute the query\n"
        "and one row a document to predict it. A document has one reader here, so no KV read is\n"
        "saved; below, twelve items read one passage.\n"
    )
    return rankings


async def check_one_by_one(client: Client, rankings: Sequence[Ranking]) -> float:
    """Largest difference to scoring each pair as one sequence of its own, with no prefix at all."""
    worst = 0.0
    documents = TEXTS["documents"]
    ranking = rankings[0]
    for index in bar(range(len(documents)), "scoring pairs one by one"):
        query = await client.score(
            [f" {ranking.query}"],
            inference_pb2.LogLikelihood(token_logprobs=True),
            query=passage(documents[index]),
            options=inference_pb2.ScoreRequest(kernel=inference_pb2.KERNEL_NAIVE),
        )
        tokens = len(query.token_logprobs[0])
        whole = await client.score(
            [passage(documents[index]) + f" {ranking.query}"],
            inference_pb2.LogLikelihood(token_logprobs=True),
            contexts=[inference_pb2.Context()],
            options=inference_pb2.ScoreRequest(kernel=inference_pb2.KERNEL_NAIVE),
        )
        alone = float(whole.token_logprobs[0][-tokens:].sum())
        worst = max(worst, abs(alone - float(ranking.scores[index])))
    return worst


async def rank_topics(client: Client) -> None:
    """One document, many candidate topics: one prefix, many items."""
    document, topics = TEXTS["documents"][1], TEXTS["topics"]
    scores: Scores
    scores, milliseconds = await timed(
        client.score(
            [f" {topic}" for topic in topics],
            inference_pb2.LogLikelihood(length_normalized=True),
            query=f"Passage: {document['text']}\nThe topic of this passage is:",
        )
    )
    shown = table(
        f"{len(topics)} topics for the passage on {document['title']}, log-likelihood a token",
        ("topic", "score", *USAGE_COLUMNS),
    )
    for row in np.argsort(-scores.scores)[:5]:
        cells = usage_cells(scores.usage, milliseconds) if not shown.row_count else [""] * 5
        shown.add_row(topics[row], f"{scores.scores[row]:.2f}", *cells)
    console.print(shown)
    console.print()


async def label_reviews(client: Client) -> None:
    """Two solved examples are the shared prefix; the labels are read after each review."""
    labels, reviews = TEXTS["labels"], TEXTS["reviews"]
    scores, milliseconds = await timed(
        client.score(
            [f" {review}" for review in reviews],
            inference_pb2.LabelProbabilities(labels=labels),
            query="\nSentiment:",
            contexts=[inference_pb2.Context(text=TEXTS["examples"])],
            options=inference_pb2.ScoreRequest(item_first=True),
        )
    )
    shown = table(
        f"Labels of {len(reviews)} reviews after two examples; the mass is what the labels cover",
        ("review", *(f"P({label!r})" for label in labels), "mass"),
    )
    for review, row, mass in zip(reviews, scores.scores, scores.label_mass, strict=True):
        shown.add_row(review, *(f"{value:.2f}" for value in row), f"{mass:.2f}")
    console.print(shown)
    usage = scores.usage
    console.print(
        f"{usage.cached_tokens} tokens cached, {usage.shared_tokens} shared, "
        f"{usage.computed_tokens} computed, {milliseconds:.0f} ms, "
        f"{usage.kv_avoided_bytes / 1e6:,.0f} MB of KV reads saved\n"
    )


async def sample_summaries(client: Client) -> None:
    """Four samples over one prompt, streamed; one message a step brings the tokens of all."""
    passage_text = TEXTS["documents"][1]["text"]
    prompt = chat(f"{passage_text}\n\n{TEXTS['question']}")
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text=prompt),
        n=4,
        max_new_tokens=48,
        sampling=inference_pb2.SamplingParams(temperature=0.7, top_p=0.95, seed=7),
    )
    texts = [""] * 4
    messages = 0
    start = time.perf_counter()
    usage: Usage | None = None
    async for step in client.generate(request):
        messages += 1
        for news in step.news:
            texts[news.sample] += news.text
        usage = step.usage or usage
    seconds = time.perf_counter() - start
    if usage is None:
        raise RuntimeError("the stream ended without its usage")
    console.print(
        "[bold]Four one-sentence summaries of that passage, sampled together over one prompt[/bold]"
    )
    for text in texts:
        line = f"- {' '.join(text.split())}"
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print(
        f"  {usage.output_tokens} tokens in {messages} messages, "
        f"{usage.output_tokens / seconds:.0f} tokens/s, "
        f"{usage.kv_read_bytes / 1e6:,.0f} MB of KV read, "
        f"{usage.kv_avoided_bytes / 1e6:,.0f} MB avoided"
    )


async def show(target: str) -> bool:
    async with Client(target) as client:
        model = await client.model()
        about = f"{model.model}, {model.dtype} on {model.device}"
        console.print(f"[bold]stemserve {model.version}: {about}[/bold]\n")
        rankings = await rank_documents(client)
        difference = await check_one_by_one(client, rankings)
        agrees = difference <= TOLERANCE
        console.print(
            f"Largest difference to scoring each pair on its own: {difference:.1e} "
            f"({'agrees' if agrees else f'DIFFERS by more than {TOLERANCE}'})\n"
        )
        await rank_topics(client)
        await label_reviews(client)
        await sample_summaries(client)
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    model = parser.parse_args().model
    with running_server(model) as target:
        agrees = asyncio.run(show(target))
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:  # the server said why
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
