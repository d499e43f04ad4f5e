"""The fastest of the ways in which a model computes products of few rows, found when it starts."""

import logging
from collections.abc import Callable

import torch

from stemserve.worker.graphs.capture import Capture
from stemserve.worker.models.layer_ops import LayerOps

log = logging.getLogger(__name__)

REPLAYS = 8


def capture_fastest(
    ops: LayerOps,
    rows: int,
    capture: Capture,
    work: Callable[[], None],
) -> Callable[[], None]:
    """The work as it is captured in each way, and the fastest of these."""
    try:
        replays: list[Callable[[], None]] = []
        for way in range(ops.product_ways(rows)):
            ops.product_way.number = way
            replays.append(capture(work))
    finally:
        ops.product_way.number = 0
    if len(replays) == 1:
        return replays[0]
    times = [_milliseconds(replay) for replay in replays]
    shown = ", ".join(f"{time:.2f}" for time in times)
    log.info("%d rows by the ways of their products, without attention: %s ms", rows, shown)
    return replays[times.index(min(times))]


def _milliseconds(replay: Callable[[], None]) -> float:
    """Of a replay, behind one that is not counted."""
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    replay()
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPLAYS
