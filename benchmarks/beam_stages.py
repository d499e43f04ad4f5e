"""CPU time of a beam search's step outside the model, by stage, in one thread and without a worker.

    PYTHONPATH=benchmarks python benchmarks/beam_stages.py [--widths 8 32 256] [--rest-ms 4]

From a step's result to the plan of the next: what a GPU waits for, since a search has one step in
flight. The results are made up: each beam's likeliest tokens among 151,936. Links between processes
and launches are left out.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from frontend_stages import FACTS
from rich.console import Console
from rich.table import Table

from stemserve.kernels.codec.pairs import Pairing
from stemserve.kernels.codec.pieces import DEFAULT_COSTS, DEFAULT_DIVISION
from stemserve.kernels.codec.planner import Planner
from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.request import BeamSpec, EarlyStopping, GenerateJob, Int32
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.step import decode_step

Made = TypeVar("Made")

VOCAB, STEP_TOKENS, KV_PAGES = 151_936, 2048, 32_768
GROUP, BINS = 4, 49  # heads that share K and V, and CTAs of one, as an H200 has for the 4B model
KEPT = 10.0  # percentile of a stage's times: other work on the machine only adds to them
READ = 12  # made-up results that come again
COLD_BYTES = 4 << 20  # touched before each step: in a server much else runs between two
FACTS_HERE = replace(FACTS, vocab_size=VOCAB, kv_pages=KV_PAGES, sampler_slots=1024)
LIMITS = StepLimits(
    vocab_size=VOCAB,
    context_tokens=FACTS.context_tokens,
    page_size=FACTS.page_size,
    kv_pages=KV_PAGES,
    sampler_slots=1024,
    max_step_tokens=STEP_TOKENS,
    has_lm_head=True,
    classes=0,
)


class Results:
    """Of steps whose rows read `width` tokens each."""

    def __init__(self, rng: np.random.Generator, width: int) -> None:
        self._rng = rng
        self._width = width
        self._tops: dict[int, list[tuple[bytes, bytes]]] = {}

    def blob(self, plan: worker_pb2.StepPlan) -> bytes:
        rows = len(plan.sample_rows) // 4
        result = worker_pb2.StepResult(step_id=plan.step_id, step_seconds=0.004, trees=1)
        if rows:
            indptr: Int32 = np.arange(rows + 1, dtype=np.int32) * self._width
            result.sampled_tokens = np.full(rows, -1, np.int32).tobytes()
            result.sampled_logprobs = np.zeros(rows, np.float32).tobytes()
            result.top_indptr = indptr.tobytes()
            result.top_ids, result.top_logprobs = self._tops_of(rows)
        result.groups.add(phase="decode", rows=rows, segments=rows)
        return result.SerializeToString()

    def _tops_of(self, rows: int) -> tuple[bytes, bytes]:
        made = self._tops.setdefault(rows, [])
        if len(made) < READ:
            shape = (rows, self._width)
            steps = self._rng.integers(1, VOCAB // self._width, shape, dtype=np.int32)
            behind = np.sort(self._rng.gamma(2.0, 1.0, shape), axis=1) + 1
            made.append((steps.cumsum(1, np.int32).tobytes(), (-behind).astype("<f4").tobytes()))
        return made[int(self._rng.integers(len(made)))]


class Stopwatch:
    """Microseconds of the thread, by stage."""

    def __init__(self) -> None:
        self._laps: dict[str, list[float]] = {}

    def __call__(self, stage: str, work: Callable[[], Made]) -> Made:
        began = time.thread_time_ns()
        made = work()
        self._laps.setdefault(stage, []).append((time.thread_time_ns() - began) / 1e3)
        return made

    def kept(self, since: int) -> dict[str, float]:
        return {s: float(np.percentile(laps[since:], KEPT)) for s, laps in self._laps.items()}


def search(width: int, prompt_tokens: int, new_tokens: int) -> GenerateJob:
    rng = np.random.default_rng(0)
    return GenerateJob(
        request_id="search",
        prompt=rng.integers(0, VOCAB, prompt_tokens, dtype=np.int32),
        samplers=(),
        max_new_tokens=new_tokens,
        stop_ids=frozenset(),
        beams=BeamSpec(
            width=width, best=width, length_penalty=1.0, early_stopping=EarlyStopping.HEURISTIC
        ),
    )


def measure(width: int, prompt_tokens: int, steps: int, rest_s: float) -> dict[str, float]:
    """Microseconds a step, by stage, with a rest before each result."""
    watch, cold = Stopwatch(), np.zeros(COLD_BYTES, np.uint8)
    results = Results(np.random.default_rng(1), width)
    batcher = Batcher(FACTS_HERE, BatcherLimits(max_step_tokens=STEP_TOKENS), clock=time.monotonic)
    batcher.submit(search(width, prompt_tokens, steps))
    planner = Planner(
        group=GROUP,
        bins=BINS,
        window=0,
        costs=DEFAULT_COSTS,
        division=DEFAULT_DIVISION,
        pairing=Pairing(),
    )
    while (plan := watch("next step planned", batcher.plan_step)) is not None:
        request = worker_pb2.RunRequest(plan=plan)
        blob = watch("plan written", request.SerializeToString)
        read = watch("worker: plan read", partial(worker_pb2.RunRequest.FromString, blob))
        step = watch("worker: checked", partial(decode_step, read.plan, LIMITS))
        if step.num_rows == width:
            watch("worker: tree planned", partial(planner.take, step.layout))
        answer = results.blob(plan)
        cold += 1
        time.sleep(rest_s)
        result = watch("result read", partial(worker_pb2.StepResult.FromString, answer))
        watch("result taken", partial(batcher.apply, result))
    return watch.kept(since=prompt_tokens // STEP_TOKENS + 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 32, 256])
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rest-ms", type=float, default=4.0, help="that a step runs elsewhere")
    options = parser.parse_args()
    found = {
        f"{width} beams": measure(
            width, options.prompt_tokens, options.steps, options.rest_ms / 1e3
        )
        for width in options.widths
    }
    table = Table("", *found, title="CPU microseconds a step")
    for stage in next(iter(found.values())):
        table.add_row(stage, *(f"{of_width[stage]:.0f}" for of_width in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
