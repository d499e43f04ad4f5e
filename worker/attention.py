"""The attention of one step: every group with its strategy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.fused.heads import Heads
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.strategy import PlacesResults, Work
from stemserve.worker.choice.dispatch import Choice
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.steps.step import Step

_Rows = slice | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    choice: Choice
    plan: Any
    rows: _Rows  # of the step
    clock: "Clock"
    is_timed: bool

    @property
    def work(self) -> Work:
        work: Work = self.plan.work
        return work


class StepAttention:
    """Called by the model once a layer, with all rows of the step."""

    def __init__(self, step: Step, choices: Sequence[Choice], pool: KvPool, *, timed: bool) -> None:
        self._pool = pool
        self.groups = [_plan(choice, pool.device, timed) for choice in choices]
        first = self.groups[0].rows
        self._is_one_group = (
            len(self.groups) == 1 and isinstance(first, slice) and first.stop == step.num_rows
        )
        self._placing: PlacesResults | None = None
        strategy = self.groups[0].choice.strategy
        if self._is_one_group and _places_results(type(strategy)):
            self._placing = cast(PlacesResults, strategy)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [rows, query_heads, head_dim]
        k: Tensor,  # [rows, kv_heads, head_dim]
        v: Tensor,  # [rows, kv_heads, head_dim]
    ) -> Tensor:  # [rows, query_heads, head_dim]
        if self._is_one_group:
            return self._run(self.groups[0], layer, q, k, v)
        out = torch.empty_like(q)
        for group in self.groups:
            rows = group.rows
            out[rows] = self._run(group, layer, q[rows], k[rows], v[rows])
        return out

    def bound(
        self,
        heads: Heads,  # [rows, heads, head_dim] each, of every layer
        out: Tensor,  # [room, query_heads, head_dim], contiguous
    ) -> Callable[[int], None]:
        """What runs a layer: the result in the first rows of `out`; what is behind them may be
        overwritten."""
        if self._placing is None:

            def run_apart(layer: int) -> None:
                out[: len(heads.q)].copy_(self(layer, *heads))

            return run_apart
        group = self.groups[0]
        kv = partial(self._kv, k=heads.k, v=heads.v)
        run = self._placing.bound(group.plan, heads.q, kv, out)
        if not group.is_timed:
            return run

        def run_timed(layer: int) -> None:
            with group.clock:
                run(layer)

        return run_timed

    def _run(self, group: PlannedGroup, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with group.clock:
            return group.choice.strategy.run(group.plan, q, self._kv(layer, k, v)).out

    def _kv(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        return LayerKV(self._pool.k_pages(layer), self._pool.v_pages(layer), k, v)


@cache
def _places_results(kind: type) -> bool:
    return issubclass(kind, PlacesResults)


def _plan(choice: Choice, device: torch.device, timed: bool) -> PlannedGroup:
    plan = choice.strategy.plan(choice.group.layout)
    rows = choice.group.rows
    return PlannedGroup(
        choice=choice,
        plan=plan,
        rows=_on_device(rows, device),
        clock=make_clock(device, timed),
        is_timed=timed,
    )


def _on_device(rows: slice | np.ndarray[Any, Any], device: torch.device) -> _Rows:
    return rows if isinstance(rows, slice) else device_tensor(rows, device)


class Clock:
    """Seconds spent inside its `with` blocks; this one does not look."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def seconds(self) -> float:
        return 0.0


class _HostClock(Clock):
    def __init__(self) -> None:
        self._start = self._total = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._total += time.perf_counter() - self._start

    def seconds(self) -> float:
        return self._total


class _CudaClock(Clock):
    """Reads device time; `seconds` may be called once the device has passed the last block."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        span = (_timing_event(), _timing_event())
        span[0].record()
        self._spans.append(span)

    def __exit__(self, *_: object) -> None:
        self._spans[-1][1].record()

    def seconds(self) -> float:
        return sum(float(start.elapsed_time(end)) for start, end in self._spans) / 1e3


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_clock(device: torch.device, timed: bool) -> Clock:
    if not timed:
        return Clock()
    return _CudaClock() if device.type == "cuda" else _HostClock()
