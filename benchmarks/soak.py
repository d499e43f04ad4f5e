"""`make soak`: thousands of mixed calls on a cache that is too small for them.

Scores, generations of one and eight samples, beam searches, and calls that their clients give up,
over prefixes that they share. Ends with one line of JSON: requests, wrong_answers, stuck_calls,
refused, leaked_pages (once nothing runs) and rss_growth_mb (server and worker, after a tenth of
the calls).
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from faults import leaked_pages
from rich.progress import Progress
from soak_traffic import Kind, Traffic, WrongAnswer, kinds

from stemserve.service.bench.models import ModelShape
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, ClientError

CALL_S, STUCK_S = 120.0, 20.0
MB = 1e6
# Few pages: calls evict each other's prefixes, and generations give their pages up.
PAGES = ("--kv-pages", "256")
REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
TINY = ModelShape(
    name="tiny", layers=2, hidden=64, query_heads=4, kv_heads=2, intermediate=128, head_dim=16,
    vocab=2_000, context_tokens=2_048,
)  # fmt: skip


class Soak:
    def __init__(
        self, server: RunningServer, traffic: Traffic, options: argparse.Namespace
    ) -> None:
        self._server = server
        self._kinds = kinds(traffic)
        self._requests: int = options.requests
        self._until = time.monotonic() + (options.seconds or float("inf"))
        self._rss_after_start = 0
        self.begun = 0
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def is_over(self) -> bool:
        return self.begun >= self._requests or time.monotonic() >= self._until

    async def run(self, callers: int, seed: int, progress: Progress) -> None:
        task = progress.add_task("calls", total=self._requests)
        async with asyncio.TaskGroup() as calling:
            for number in range(callers):
                calling.create_task(self._call(random.Random(seed + number)))
            while not self.is_over:
                progress.update(task, completed=self.begun)
                await asyncio.sleep(0.2)

    @property
    def rss_growth_mb(self) -> float:
        return round((self._server.resident_bytes - self._rss_after_start) / MB, 1)

    async def _call(self, rng: random.Random) -> None:
        async with Client(self._server.address, timeout_s=CALL_S) as client:
            while not self.is_over:
                self.begun += 1
                if self.begun == self._requests // 10 or not self._rss_after_start:
                    self._rss_after_start = self._server.resident_bytes
                kind = rng.choices(list(self._kinds), weights=list(self._kinds.values()))[0]
                await self._one(kind, client, rng)

    async def _one(self, kind: Kind, client: Client, rng: random.Random) -> None:
        try:
            async with asyncio.timeout(CALL_S + STUCK_S):
                await kind(client, rng)
        except TimeoutError:
            self.outcomes["stuck"] += 1
        except WrongAnswer as problem:
            self.outcomes["wrong"] += 1
            self.problems.append(str(problem))
        except ClientError as error:
            refused = error.code in REFUSALS
            self.outcomes["refused" if refused else "wrong"] += 1
            if not refused:
                self.problems.append(str(error))
        else:
            self.outcomes["right"] += 1


async def run(server: RunningServer, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    async with Client(server.address, timeout_s=CALL_S) as client:
        model = await client.model()
        soak = Soak(server, Traffic.drawn(model.vocab_size, seed), options)
        with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
            await soak.run(options.callers, seed, progress)
        leaked = await leaked_pages(client)
    for problem in soak.problems[:20]:
        print(problem, file=sys.stderr)
    return {
        "requests": soak.begun,
        "wrong_answers": soak.outcomes["wrong"],
        "stuck_calls": soak.outcomes["stuck"],
        "refused": soak.outcomes["refused"],
        "leaked_pages": leaked,
        "rss_growth_mb": soak.rss_growth_mb,
        "model": f"{model.model}, {model.dtype} on {model.device}",
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="S", help="end then, if not before")
    parser.add_argument("--callers", type=int, default=24, metavar="N", help="calls at a time")
    parser.add_argument("--seed", type=int, help="of the calls; else a new one")
    parser.add_argument("--model", type=Path, help="else a tiny one with random weights")
    parser.add_argument(
        "--serve-options",
        default="",
        metavar="WORDS",
        help="of stemserve serve: --serve-options='...'",
    )
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        words = [*PAGES, *options.serve_options.split()]
        model = options.model
        if model is None:
            model = TINY.write(Path(folder))
            words += ["--load-format", "dummy"]
        log = Path(folder) / "server.log"
        with running_server(["--model", str(model), *words], log=log) as server:
            result = asyncio.run(run(server, options, seed))
    print(json.dumps(result))
    return int(any(result[key] for key in ("wrong_answers", "stuck_calls", "leaked_pages")))


if __name__ == "__main__":
    sys.exit(main())
