"""A step of a beam search on the CPU, beside transformers' own, over one long prompt.

    PYTHONPATH=benchmarks python benchmarks/bench_beams.py [--threads N] [--output FILE]

Ours is a server, called through gRPC with the prompt cached: the seconds of a search of 25 tokens
less those of a search of 1, a token; wall time at the client, and what server and worker take of a
CPU. The peer gets a KV cache of the prompt that is already as wide as its beams, one that grows and
one with room for the new tokens; its seconds are those from one step's logits to the next's, the
median of 4. All take turns. Sequences must be equal and scores agree, or no speed is reported.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import report
import torch
from bench_cpu import MODELS
from peer_model import hugging_face_folder
from peer_transformers import TransformersPeer
from transformers import DynamicCache, StaticCache
from workloads import Int32, random_tokens

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, token_blob
from stemserve.service.default_model import fetch_default

PROMPT_TOKENS = 4096
WIDTH = 8
NEW_TOKENS = 25
PEER_TOKENS = 5
OURS, GROWING, PREALLOCATED = "stemserve", "transformers", "transformers_preallocated"
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


class Seconds(NamedTuple):
    """Of a step."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    client: Client
    server: RunningServer
    prompt: Int32

    async def search(self, tokens: int) -> tuple[Found, Seconds]:
        """The best sequences, and seconds of the whole call."""
        wall, cpu = time.perf_counter(), self.server.cpu_seconds
        found = self.client.generate(search(self.prompt, tokens))
        (answer,) = [step async for step in found]
        seconds = Seconds(time.perf_counter() - wall, self.server.cpu_seconds - cpu)
        return [(list(news.token_ids), news.score or 0.0) for news in answer.news], seconds

    async def step(self) -> Seconds:
        _, first = await self.search(1)
        _, whole = await self.search(NEW_TOKENS)
        steps = NEW_TOKENS - 1
        return Seconds((whole.wall - first.wall) / steps, (whole.cpu - first.cpu) / steps)


class Peer:
    def __init__(self, model: Path, prompt: Int32, *, threads: int) -> None:
        self._peer = TransformersPeer(hugging_face_folder(model), threads=threads)
        self._cache = self._peer.prefill(prompt[:-1])
        self._ids = torch.tensor(prompt.tolist())[None]

    def search(self, *, grows: bool) -> tuple[Found, Seconds]:
        """The best sequences, and seconds a step; `grows`: the cache, with each step."""
        times: list[Seconds] = []

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(Seconds(time.perf_counter(), time.process_time()))
            return scores

        peer, prompt = self._peer, self._cache
        if grows:
            cache: DynamicCache | StaticCache = peer.repeated(prompt, batch=WIDTH)
        else:
            cache = peer.preallocated(prompt, batch=WIDTH, room=PEER_TOKENS + 1)
        model: Any = self._peer.model
        with torch.inference_mode():
            found = model.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                cache=cache,
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
        gaps = [(b.wall - a.wall, b.cpu - a.cpu) for a, b in pairwise(times)]
        seconds = Seconds(*(median(column) for column in zip(*gaps, strict=True)))
        return list(zip(tokens, found.sequences_scores.tolist(), strict=True)), seconds


def check(found: Sequence[tuple[list[int], float]], peers: Found) -> float:
    """The largest difference of scores."""
    if [tokens for tokens, _ in found] != [tokens for tokens, _ in peers]:
        sys.exit("no speed is reported: the sequences differ")
    lead = max(abs(a - b) for (_, a), (_, b) in zip(found, peers, strict=True))
    if lead > AGREEMENT:
        sys.exit(f"no speed is reported: scores differ by {lead}")
    return lead


async def measure(server: RunningServer, peer: Peer, prompt: Int32, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[Seconds]] = {name: [] for name in (OURS, GROWING, PREALLOCATED)}
    leads = list[float]()
    async with Client(server.address) as client:
        us = Ours(client=client, server=server, prompt=prompt)
        await us.search(1)  # the prompt is cached from here on
        for number in range(rounds):
            seconds[OURS].append(await us.step())
            found, _ = await us.search(PEER_TOKENS)
            for name in (GROWING, PREALLOCATED):
                peers, taken = peer.search(grows=name == GROWING)
                seconds[name].append(taken)
                leads.append(check(found, peers))
            print(f"round {number}: { ({k: v[-1] for k, v in seconds.items()}) }", file=sys.stderr)
    medians = {
        name: Seconds(*(median(column) for column in zip(*each, strict=True)))
        for name, each in seconds.items()
    }
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "width": WIDTH,
        "seconds_per_step": {
            name: {"wall": [each.wall for each in all_], "cpu": [each.cpu for each in all_]}
            for name, all_ in seconds.items()
        },
        "beam_step_vs_transformers": _ratios(medians[GROWING], medians[OURS]),
        "beam_step_vs_transformers_preallocated": _ratios(medians[PREALLOCATED], medians[OURS]),
        "largest_score_difference": max(leads),
    }


def _ratios(theirs: Seconds, ours: Seconds) -> dict[str, float]:
    return {"wall": round(theirs.wall / ours.wall, 2), "cpu": round(theirs.cpu / ours.cpu, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of ours and of the peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the prompt's tokens")
    parser.add_argument("--model", type=Path, help="GGUF file (default: fetched once)")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    model = options.model or fetch_default(MODELS, progress=print)
    prompt = random_tokens(np.random.default_rng(options.seed), PROMPT_TOKENS)
    flags = ["--model", str(model), "--threads", str(options.threads), "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(model, prompt, threads=options.threads)
        with running_server(flags, log=Path(folder) / "server.log") as server:
            results = asyncio.run(measure(server, peer, prompt, options.rounds))
    if options.output:
        command = f"python benchmarks/bench_beams.py --threads {options.threads}"
        report.write(options.output, command=command, threads=options.threads, results=results)
    print(results)


if __name__ == "__main__":
    main()
