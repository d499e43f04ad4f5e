"""A step of a beam search beside a token of as many samples, over one cached prompt.

    python benchmarks/bench_beam_steps.py --model 4B [--output FILE]

A search has one step in flight, samples two or a burst: what the host takes between a step's result
and the next step is on top of the device's time. Both generate the same number of tokens for the
same prompt, in turns; a token's time is what a call of all tokens takes longer than one of a single
token, over their difference, at the client. The ratio is of medians. Where the server measures a
GPU, its time in decode steps, and the time between them, are told as well.
"""

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.facts import facts
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.scrape import Reading, scrape
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, token_blob
from stemserve.service.request import Int32

BEAMS, SAMPLES = "beams", "samples"
MOST_RATIO = 1.15  # on an H200, of a width of 32 over 8192 tokens of the 4B model
FIRST_ID, LAST_IDS = 100, 300  # a vocabulary's ends are left to special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Milliseconds a token; of the device, in decode steps and between them."""

    wall: float
    device: float
    idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    client: Client
    server: RunningServer
    prompt: Int32
    new_tokens: int

    async def step(self, kind: str, width: int, seed: int) -> Step:
        one = await self._seconds(self._request(kind, width, seed, 1))
        before = scrape(self.server.metrics_url)
        whole = await self._seconds(self._request(kind, width, seed, self.new_tokens))
        grown = scrape(self.server.metrics_url).since(before)
        steps = self.new_tokens - 1
        return Step(
            wall=(whole - one) / steps * 1e3,
            device=_decode_seconds(grown, "busy") / steps * 1e3,
            idle=_decode_seconds(grown, "idle") / steps * 1e3,
        )

    def _request(
        self, kind: str, width: int, seed: int, tokens: int
    ) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Context(tokens=token_blob(self.prompt)),
            n=width,
            max_new_tokens=tokens,
            ignore_eos=True,
        )
        if kind == BEAMS:
            request.beam_search.width = width
        else:
            request.sampling.temperature = 1.0
            request.sampling.seed = seed
        return request

    async def _seconds(self, request: inference_pb2.GenerateRequest) -> float:
        began, found = time.perf_counter(), 0
        async for step in self.client.generate(request):
            found += sum(len(news.token_ids) for news in step.news)
        seconds = time.perf_counter() - began
        if found != request.n * request.max_new_tokens:
            sys.exit(f"{found} tokens came instead of {request.n} x {request.max_new_tokens}")
        return seconds


def _decode_seconds(grown: Reading, what: str) -> float:
    return grown.total(f"device_{what}_seconds_total", phase="decode")


async def measure(
    server: RunningServer, options: argparse.Namespace
) -> dict[int, dict[str, list[Step]]]:
    """Steps of each round, by width and kind."""
    steps: dict[int, dict[str, list[Step]]] = {
        width: {SAMPLES: [], BEAMS: []} for width in options.widths
    }
    rng = np.random.default_rng(options.seed)
    async with Client(server.address, timeout_s=300.0) as client:
        vocab = (await client.model()).vocab_size
        length: int = options.prompt_tokens
        prompt: Int32 = rng.integers(FIRST_ID, vocab - LAST_IDS, (length,), dtype=np.int32)
        bench = Bench(client=client, server=server, prompt=prompt, new_tokens=options.new_tokens)
        for number in range(options.rounds + 1):
            for width, kinds in steps.items():
                for kind, taken in kinds.items():
                    step = await bench.step(kind, width, options.seed + number)
                    print(f"round {number}: {width} {kind} {step}", file=sys.stderr, flush=True)
                    if number:  # the first warms up
                        taken.append(step)
    return steps


def summary(steps: Mapping[str, Sequence[Step]]) -> dict[str, float]:
    """Medians, in milliseconds, and the ratio that counts."""
    found: dict[str, float] = {}
    for kind, taken in steps.items():
        for name in ("wall", "device", "idle"):
            found[f"{kind}_{name}_ms"] = round(median(getattr(s, name) for s in taken), 4)
    found["ratio"] = round(found[f"{BEAMS}_wall_ms"] / found[f"{SAMPLES}_wall_ms"], 3)
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ", ".join(SHAPES)
    parser.add_argument("--model", default="4B", help=f"{shapes} with random weights, or a path")
    parser.add_argument("--widths", type=int, nargs="+", default=[32])
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--rounds", type=int, default=5, help="beside one that warms up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--serve-options", nargs=argparse.REMAINDER, default=[], help="the rest: of stemserve serve"
    )
    parser.add_argument("--output", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model", options.model]
        if options.model in SHAPES:
            path = SHAPES[options.model].write(Path(folder))
            words = ["--model", str(path), "--load-format", "dummy"]
        log = Path(folder) / "server.log"
        with running_server([*words, *options.serve_options], log=log) as server:
            steps = asyncio.run(measure(server, options))
    results = {f"{width}": summary(of_width) for width, of_width in steps.items()}
    for width, found in results.items():
        print(f"width {width}: {json.dumps(found)}")
    if "32" in results:
        print(f"goal on an H200, 4B, 8192 tokens: ratio {MOST_RATIO}")
    if options.output:
        command = shlex.join(["python", "benchmarks/bench_beam_steps.py", *sys.argv[1:]])
        known = facts(seed=options.seed, command=command)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**known, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
