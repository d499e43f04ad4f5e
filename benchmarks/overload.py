"""`make load`: a real server at twice its capacity.

First the latency of calls one at a time, then the capacity (calls a second with several
at a time),
then calls at twice that rate, Poisson, each with its own connection's patience. Ends with one line
of JSON:

* goodput_ratio: answered calls a second at twice the capacity, over the capacity
* p99_ratio: their P99 over 2x the unloaded P99 plus the time that accepted work may take
* refusal_p99_ms: how long the others waited for their RESOURCE_EXHAUSTED
* rss_growth_mb: of the server and its worker, from the first half of the overload to its end
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.progress import Progress

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, ClientError

AT_ONCE = 16  # calls that keep the worker busy
QUEUE_S = 0.5  # that accepted work may take
ROWS = 128  # of a step, about three calls: each waits for the others of its step
UNLOADED_S = 8.0
CAPACITY_S = 12.0
WARM_S = 4.0
CALL_S = 60.0
QUERY = "The capital of France is a city whose name is"
ITEMS = tuple(f" {name}" for name in ("Paris", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna"))


@dataclass(slots=True)
class Outcomes:
    answered_s: list[float] = field(default_factory=list[float])  # latencies
    refused_s: list[float] = field(default_factory=list[float])
    failed: list[str] = field(default_factory=list[str])


class Caller:
    """Makes calls that must be computed: each has a query of its own."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)

    async def call(self, outcomes: Outcomes) -> None:
        query = f"{self._rng.randrange(1 << 60)}. {QUERY}"
        started = time.monotonic()
        try:
            await self._client.score(list(ITEMS), inference_pb2.LogLikelihood(), query=query)
        except ClientError as error:
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                outcomes.refused_s.append(time.monotonic() - started)
            else:
                outcomes.failed.append(str(error))
        else:
            outcomes.answered_s.append(time.monotonic() - started)


async def one_at_a_time(caller: Caller, seconds: float) -> Outcomes:
    outcomes, end = Outcomes(), time.monotonic() + seconds
    while time.monotonic() < end:
        await caller.call(outcomes)
    return outcomes


async def many_at_a_time(caller: Caller, seconds: float) -> float:
    """Calls a second."""
    started = time.monotonic()
    each = await asyncio.gather(*(one_at_a_time(caller, seconds) for _ in range(AT_ONCE)))
    answered = sum(len(outcomes.answered_s) for outcomes in each)
    return answered / (time.monotonic() - started)


async def at_rate(
    caller: Caller, rate: float, seconds: float, tick: Callable[[float], None]
) -> Outcomes:
    """Poisson arrivals; none waits for another."""
    outcomes, rng = Outcomes(), random.Random(0)
    calls: set[asyncio.Task[None]] = set()
    started = due = time.monotonic()
    while due - started < seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        call = asyncio.create_task(caller.call(outcomes))
        calls.add(call)
        call.add_done_callback(calls.discard)
        due += rng.expovariate(rate)
        tick(due - started)
    await asyncio.gather(*calls)
    return outcomes


async def overload(server: RunningServer, seconds: float) -> dict[str, Any]:
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("overload", total=seconds)
        async with Client(server.address, timeout_s=CALL_S) as client:
            caller = Caller(client, seed=time.time_ns())
            await one_at_a_time(caller, WARM_S)
            unloaded = await one_at_a_time(caller, UNLOADED_S)
            capacity = await many_at_a_time(caller, CAPACITY_S)
            memory: list[int] = []

            async def note_memory() -> None:
                await asyncio.sleep(seconds / 2)
                memory.append(server.resident_bytes)

            noting = asyncio.create_task(note_memory())
            outcomes = await at_rate(
                caller, 2 * capacity, seconds, lambda s: progress.update(task, completed=s)
            )
            await noting
            memory.append(server.resident_bytes)
    return summary(unloaded, capacity, outcomes, seconds) | {
        "rss_growth_mb": round((memory[-1] - memory[0]) / 1e6, 1)
    }


def summary(
    unloaded: Outcomes, capacity: float, outcomes: Outcomes, seconds: float
) -> dict[str, Any]:
    bound_s = 2 * _p99(unloaded.answered_s) + QUEUE_S
    return {
        "goodput_ratio": round(len(outcomes.answered_s) / seconds / capacity, 3),
        "p99_ratio": round(_p99(outcomes.answered_s) / bound_s, 3),
        "refusal_p99_ms": round(1e3 * _p99(outcomes.refused_s), 1),
        "capacity_calls_per_s": round(capacity, 1),
        "unloaded_p99_ms": round(1e3 * _p99(unloaded.answered_s), 1),
        "p50_ms": round(1e3 * float(np.median(outcomes.answered_s or [0.0])), 1),
        "p99_ms": round(1e3 * _p99(outcomes.answered_s), 1),
        "answered": len(outcomes.answered_s),
        "refused": len(outcomes.refused_s),
        "failed": len(outcomes.failed),
    }


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    arguments = parser.parse_args()
    # One core for the model: the front end and the callers need the other. The cache is small, so
    # that it is full, and its memory touched, before the overload.
    options = ["--model", arguments.model, "--threads", "1", "--kv-memory", "64M"]
    options += ["--max-step-tokens", str(ROWS)]
    settings = {"STEMSERVE__LIMITS__MAX_QUEUED_MS": str(round(1e3 * QUEUE_S))}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(options, log=Path(folder) / "server.log", settings=settings) as server,
    ):
        result = asyncio.run(overload(server, arguments.seconds))
    print(json.dumps(result))
    return int(result["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
