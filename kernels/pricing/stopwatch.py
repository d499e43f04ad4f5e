"""Host and device seconds of a strategy's `run`, over inputs as a model has them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import Strategy

LAYERS = 2  # whose keys and values take turns, as in a model
MOST_REPEATS = 12
LEAST_REPEATS = 3
POINT_SECONDS = 0.002  # that the repeats of a measurement take at most, if they are enough
LONGEST_LAUNCH_S = 250e-6  # the first run of a plan may take far longer
SLEEP_CYCLES_A_SECOND = 2_000_000_000  # at the highest clock of today's GPUs

# cuda.Event and _sleep are partly untyped.
CUDA: Any = torch.cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    shape: HeadShape
    device: torch.device
    dtype: torch.dtype

    def random(self, *size: int) -> Tensor:
        """Not ones: tensor cores are faster on what hardly toggles a bit."""
        return torch.randn(*size, dtype=self.dtype, device=self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class StrategyBench:
    """Inputs that fit any layout up to some size, and the clock."""

    def __init__(self, bench: Bench, *, pages: int, page_size: int, rows: int) -> None:
        shape = bench.shape
        self.bench = bench
        self._q = bench.random(rows, shape.query_heads, shape.head_dim)
        heads = (shape.kv_heads, shape.head_dim)
        self._layers = [
            LayerKV(
                bench.random(pages, page_size, *heads),
                bench.random(pages, page_size, *heads),
                bench.random(rows, *heads),
                bench.random(rows, *heads),
            )
            for _ in range(LAYERS)
        ]

    def measure(self, strategy: Strategy, plan: Any, rows: int) -> Cost:
        """Of the plan of a layout of so many rows. On a CPU all of it counts as the device's."""
        q = self._q[:rows]
        layers = [
            LayerKV(kv.k_pages, kv.v_pages, kv.k_rows[:rows], kv.v_rows[:rows])
            for kv in self._layers
        ]

        def run(number: int) -> object:
            return strategy.run(plan, q, layers[number % LAYERS])

        run(0)
        return self._on_gpu(run) if self.bench.device.type == "cuda" else best_seconds(run)

    def _on_gpu(self, run: Callable[[int], object]) -> Cost:
        self.bench.wait()
        started = time.perf_counter()
        run(1)
        host_s = time.perf_counter() - started
        self.bench.wait()
        whole_s = time.perf_counter() - started
        repeats = int(np.clip(POINT_SECONDS / whole_s, LEAST_REPEATS, MOST_REPEATS))
        first, last = CUDA.Event(enable_timing=True), CUDA.Event(enable_timing=True)
        # The device sleeps until all is issued: it then shows its own time, the host its own.
        asleep_s = repeats * min(1.5 * host_s, LONGEST_LAUNCH_S)
        CUDA._sleep(int(asleep_s * SLEEP_CYCLES_A_SECOND))
        first.record()
        started = time.perf_counter()
        for number in range(repeats):
            run(number)
        host_s = (time.perf_counter() - started) / repeats
        last.record()
        self.bench.wait()
        return Cost(host_s, float(first.elapsed_time(last)) / 1e3 / repeats)


def best_seconds(run: Callable[[int], object]) -> Cost:
    """Of a CPU: the least of several; what disturbs a measurement only ever adds to it."""
    best, spent, repeats = np.inf, 0.0, 0
    while repeats < LEAST_REPEATS or (spent < 4 * POINT_SECONDS and repeats < MOST_REPEATS):
        started = time.perf_counter()
        run(repeats)
        seconds = time.perf_counter() - started
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return Cost(0.0, float(best))
