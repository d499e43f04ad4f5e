"""Calls of a real server whose worker computes nothing: what is not the model's time."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from frontend_stages import CONTEXT_TOKENS, KV_PAGES, Shape
from workloads import random_tokens

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.server_process import environment, running_server, stop
from stemserve.service.client import Client, token_blob

FAKE_WORKER = Path(__file__).parent.parent / "tests" / "fake_worker.py"
PAUSE_S = 0.005  # between rounds
WORDS = (" yes", " no", " water", " house", " seven", " green", " under", " and")  # a token each
Call = Callable[[Client], Awaitable[Any]]
Context = inference_pb2.Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    count: int
    tokens: int
    burst: int  # decode steps that the worker runs at once
    step_ms: float = 0.0  # that the worker takes for one

    @property
    def name(self) -> str:
        return f"{self.count} streams, bursts of {self.burst}, {self.step_ms:g} ms a step"


class Rounds:
    """Of calls that start together. CPU time is of the server's process, all threads."""

    def __init__(self, model: Path, log: Path, *, max_step_tokens: int) -> None:
        self._model = model
        self._log = log
        self._max_step_tokens = max_step_tokens

    def score(
        self,
        shape: Shape,
        *,
        kind: str,
        at_once: int,
        rounds: int,
        worker: Sequence[str] = (),
    ) -> dict[str, Any]:
        """`kind` of KINDS: what the items are sent as; `worker`: more of its options."""
        with self._server(*worker) as (address, pid):
            call = partial(KINDS[kind], shape=shape, rng=np.random.default_rng(0))
            return uvloop.run(_score_rounds(address, pid, call, at_once, rounds))

    def generate(self, streams: Streams, *, rounds: int) -> dict[str, Any]:
        options = ["--max-burst-steps", str(streams.burst)]
        options += ["--step-seconds", str(1e-3 * streams.step_ms)]
        with tempfile.TemporaryDirectory() as folder:
            steps = Path(folder) / "steps"
            with self._server(*options, "--step-log", str(steps)) as (address, pid):
                measured = uvloop.run(_generate_rounds(address, pid, streams, rounds))
            idle = _idle_fraction(steps, rows=streams.count)
        return measured | {"worker_idle_fraction": round(idle, 3)}

    @contextmanager
    def _server(self, *options: str) -> Generator[tuple[str, int]]:
        with tempfile.TemporaryDirectory() as folder:
            socket = f"unix:{Path(folder) / 'worker.sock'}"
            sizes = ["--context-tokens", str(CONTEXT_TOKENS), "--kv-pages", str(KV_PAGES)]
            worker = subprocess.Popen(
                [sys.executable, str(FAKE_WORKER), "--listen", socket, *sizes, *options],
                env=environment(),
                text=True,
            )
            try:
                serve = ["--model", str(self._model), "--worker", socket]
                serve += ["--max-step-tokens", str(self._max_step_tokens)]
                with running_server(serve, log=self._log) as server:
                    yield server.address, server.pid
            finally:
                stop(worker)


async def _score_rounds(
    address: str, pid: int, call: Call, at_once: int, rounds: int
) -> dict[str, Any]:
    seconds, cpu_seconds = list[float](), 0.0
    async with Client(address) as client:
        for number in range(rounds + rounds // 4):
            calls = [call(client) for _ in range(at_once)]
            await asyncio.sleep(PAUSE_S)
            before, started = _cpu_seconds(pid), time.perf_counter()
            await asyncio.gather(*calls)
            if number >= rounds // 4:
                seconds.append(time.perf_counter() - started)
                cpu_seconds += _cpu_seconds(pid) - before
    p50, p90, p99 = np.percentile(np.array(seconds) * 1e3, [50, 90, 99]).tolist()
    return {
        "p50_ms": round(p50, 3),
        "p90_ms": round(p90, 3),
        "p99_ms": round(p99, 3),
        "server_cpu_ms_a_call": round(1e3 * cpu_seconds / rounds / at_once, 3),
    }


def _ids(client: Client, *, shape: Shape, rng: np.random.Generator) -> Any:
    workload = shape.workload(rng)
    mode = inference_pb2.LabelProbabilities(label_token_ids=workload.label_ids)
    context = Context(tokens=token_blob(workload.prefix))
    return client.score_tokens(list(workload.items), mode, contexts=[context])


def _texts(client: Client, *, shape: Shape, rng: np.random.Generator) -> Any:
    items = [_text(rng, shape.item_tokens) for _ in range(shape.items)]
    mode = inference_pb2.LabelProbabilities(labels=[" yes", " no"])
    return client.score(items, mode, query=_text(rng, shape.prefix_tokens))


def _repeated_text(client: Client, *, shape: Shape, rng: np.random.Generator) -> Any:
    items = [_text(rng, shape.item_tokens)] * shape.items
    contexts = [Context(tokens=token_blob(random_tokens(rng, 16))) for _ in items]
    options = inference_pb2.ScoreRequest(item_context=range(len(items)))
    mode = inference_pb2.LogLikelihood()
    return client.score(items, mode, contexts=contexts, options=options)


def _text(rng: np.random.Generator, words: int) -> str:
    return "".join(rng.choice(WORDS, words).tolist())


KINDS: Mapping[str, Callable[..., Any]] = {
    "ids": _ids,
    "texts": _texts,
    "one text, a context each": _repeated_text,
}


async def _generate_rounds(address: str, pid: int, streams: Streams, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prefix = random_tokens(rng, 256)
    async with Client(address) as client:

        async def one() -> int:
            prompt = np.concatenate((prefix, random_tokens(rng, 16)))
            request = inference_pb2.GenerateRequest(
                prompt=Context(tokens=token_blob(prompt)),
                max_new_tokens=streams.tokens,
                ignore_eos=True,
            )
            return len([step async for step in client.generate(request)])

        messages, seconds, cpu_seconds = 0, 0.0, 0.0
        for number in range(rounds + 1):
            before, started = _cpu_seconds(pid), time.perf_counter()
            found = await asyncio.gather(*(one() for _ in range(streams.count)))
            if number:
                messages += sum(found)
                seconds += time.perf_counter() - started
                cpu_seconds += _cpu_seconds(pid) - before
    tokens = streams.count * streams.tokens * rounds
    return {
        "tokens_per_s": round(tokens / seconds),
        "tokens_a_message": round(tokens / messages, 2),
        "server_cpu_us_a_token": round(1e6 * cpu_seconds / tokens, 1),
        "server_cpu_us_a_message": round(1e6 * cpu_seconds / messages, 1),
    }


def _idle_fraction(steps: Path, *, rows: int) -> float:
    """Of the worker's time in its steps of `rows` and before them, where one follows another.

    `steps`: a line each, begin and end in seconds, and rows.
    """
    begin, end, of_step = np.loadtxt(steps, ndmin=2).T
    follows = (of_step[1:] == rows) & (of_step[:-1] == rows)
    idle_s = (begin[1:] - end[:-1])[follows].sum()
    return float(idle_s / (idle_s + (end[1:] - begin[1:])[follows].sum()))


def _cpu_seconds(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) * 1e-9
