"""Times of calls on a GPU: replays of CUDA graphs, and back-to-back calls without one."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]

WARM_CALLS = 3
LEAST_REPLAYS = 3
REPLAY_US = 4e3  # replays of a long call stop after so much


def graph_of(calls: Sequence[Call], warm_calls: int = WARM_CALLS) -> torch.cuda.CUDAGraph:
    """The calls in order, captured; the first runs before, to compile and to allocate."""
    for _ in range(warm_calls):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, most: int = 20) -> float:
    """Median of replays."""
    first = _timed_us(graph.replay, 1)[0]
    count = min(most, max(LEAST_REPLAYS, int(REPLAY_US / max(first, 1.0))))
    return statistics.median(_timed_us(graph.replay, count))


def _timed_us(call: Call, count: int) -> list[float]:
    make_event: Any = torch.cuda.Event
    events = [[make_event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def eager_us(call: Call, least_us: float = 3e3, most_calls: int = 50) -> float:
    """Mean of back-to-back calls, host and device overlapping as they do between layers."""
    call()
    first = _spent_us(call, 1)
    count = min(most_calls, max(3, int(least_us / max(first, 1.0))))
    return _spent_us(call, count) / count


def _spent_us(call: Call, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def host_ms(call: Call, count: int = 20) -> float:
    """Median seconds of the host alone, the device idle before each call."""
    times_s: list[float] = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times_s) * 1e3
