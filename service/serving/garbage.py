"""When the process looks for garbage that only cycles keep.

A full collection looks at every object, those of a large prefix cache too: 60 ms for 65,000 pages,
in which no thread runs. What calls make is young and freed without one, so it waits for idleness.
"""

import asyncio
import gc
import time
from collections.abc import Callable

YOUNG_OBJECTS = 10_000  # new ones between collections of the young, of some 2 ms
MIDDLE_EVERY = 20  # such collections between those of what survived one
NEVER = 1 << 30

PERIOD_S = 5.0
MOST_S = 300.0  # a server that is never idle collects nevertheless


def put_off_full_collections() -> None:
    """What lives now lives for ever: no collection need look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_EVERY, NEVER)


async def collect_when_idle(
    is_idle: Callable[[], bool], *, period_s: float = PERIOD_S, most_s: float = MOST_S
) -> None:
    """Runs until cancelled. Nothing is collected where nothing was made.

    A moment between two calls is no idleness: next to nothing was made for a period.
    """
    known = seen = _collections()
    collected_at = time.monotonic()
    while True:
        await asyncio.sleep(period_s)
        before, seen = seen, _collections()
        if seen == known:
            continue
        is_quiet = seen == before and is_idle()
        if is_quiet or time.monotonic() - collected_at >= most_s:
            gc.collect()
            known, collected_at = seen, time.monotonic()


def _collections() -> int:
    """Of the young, up to now."""
    return int(gc.get_stats()[0]["collections"])
