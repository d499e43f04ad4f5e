"""A step of a beam search on the CPU, beside transformers' own, over one long prompt.

    PYTHONPATH=benchmarks python benchmarks/bench_beams.py [--threads N] [--output FILE]

Ours is a server, called through gRPC with the prompt cached: the seconds of a search of 25 tokens
less those of a search of 1, a token. The peer gets a KV cache of the prompt that is already as wide
as its beams; its seconds are those from one step's logits to the next's, the median of 4. Both take
turns. Sequences must be equal and scores agree, or no speed is reported.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import report
import torch
from bench_cpu import MODELS
from peer_model import hugging_face_folder
from peer_transformers import TransformersPeer
from workloads import Int32, random_tokens

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.server_process import serving
from stemserve.service.client import Client, GenerateStep, token_blob
from stemserve.service.default_model import fetch_default

PROMPT_TOKENS = 4096
WIDTH = 8
NEW_TOKENS = 25
PEER_TOKENS = 5
ROUNDS = 2
AGREEMENT = 1e-3  # of scores: sums of log-probabilities over random ids
Found = list[tuple[list[int], float]]


def search(prompt: Int32, tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(tokens=token_blob(prompt)),
        n=WIDTH,
        max_new_tokens=tokens,
        ignore_eos=True,
        beam_search=inference_pb2.BeamSearch(width=WIDTH, length_penalty=0.0),
    )


async def ours(client: Client, prompt: Int32, tokens: int) -> tuple[Found, float]:
    started = time.perf_counter()
    steps: list[GenerateStep] = [step async for step in client.generate(search(prompt, tokens))]
    seconds = time.perf_counter() - started
    (answer,) = steps
    return [(list(news.token_ids), news.score or 0.0) for news in answer.news], seconds


class Peer:
    def __init__(self, model: Path, prompt: Int32, *, threads: int) -> None:
        self._peer = TransformersPeer(hugging_face_folder(model), threads=threads)
        self._cache = self._peer.prefill(prompt[:-1])
        self._ids = torch.tensor(prompt.tolist())[None]

    def search(self) -> tuple[Found, float]:
        """The best sequences, and seconds a step."""
        times: list[float] = []

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter())
            return scores

        model: Any = self._peer.model
        with torch.inference_mode():
            found = model.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                cache=self._peer.repeated(self._cache, batch=WIDTH),
                logits_processor=[note],
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                length_penalty=0.0,
                max_new_tokens=PEER_TOKENS,
                eos_token_id=[model.config.vocab_size],
                pad_token_id=0,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        tokens = found.sequences[:, self._ids.shape[1] :].tolist()
        seconds = median(after - before for before, after in pairwise(times))
        return list(zip(tokens, found.sequences_scores.tolist(), strict=True)), seconds


def check(found: Sequence[tuple[list[int], float]], peers: Found) -> float:
    """The largest difference of scores."""
    if [tokens for tokens, _ in found] != [tokens for tokens, _ in peers]:
        sys.exit("no speed is reported: the sequences differ")
    lead = max(abs(a - b) for (_, a), (_, b) in zip(found, peers, strict=True))
    if lead > AGREEMENT:
        sys.exit(f"no speed is reported: scores differ by {lead}")
    return lead


async def measure(address: str, peer: Peer, prompt: Int32) -> dict[str, Any]:
    our_seconds, peer_seconds, leads = list[float](), list[float](), list[float]()
    async with Client(address) as client:
        await ours(client, prompt, 1)  # the prompt is cached from here on
        for number in range(ROUNDS):
            _, first = await ours(client, prompt, 1)
            _, whole = await ours(client, prompt, NEW_TOKENS)
            our_seconds.append((whole - first) / (NEW_TOKENS - 1))
            found, _ = await ours(client, prompt, PEER_TOKENS)
            peers, seconds = peer.search()
            peer_seconds.append(seconds)
            leads.append(check(found, peers))
            print(f"round {number}: {our_seconds[-1]:.4f} s, peer {seconds:.4f} s", file=sys.stderr)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "width": WIDTH,
        "seconds_per_step": {"stemserve": our_seconds, "transformers": peer_seconds},
        "beam_step_vs_transformers": round(median(peer_seconds) / median(our_seconds), 2),
        "largest_score_difference": max(leads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of ours and of the peer")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt's tokens")
    parser.add_argument("--model", type=Path, help="GGUF file (default: fetched once)")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    model = options.model or fetch_default(MODELS, progress=print)
    prompt = random_tokens(np.random.default_rng(options.seed), PROMPT_TOKENS)
    flags = ["--model", str(model), "--threads", str(options.threads), "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(model, prompt, threads=options.threads)
        with serving(flags, log=Path(folder) / "server.log") as address:
            results = asyncio.run(measure(address, peer, prompt))
    if options.output:
        command = "python benchmarks/bench_beams.py"
        report.write(options.output, command=command, threads=options.threads, results=results)
    print(results)


if __name__ == "__main__":
    main()
