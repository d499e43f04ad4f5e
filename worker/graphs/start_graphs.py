"""Captures a worker's graphs when it starts, and tells of it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 2.0


def run_captures(
    what: str,
    buckets: Sequence[int],
    captures: Iterator[int],  # yields each bucket that is done
    check: Callable[[], None],  # may raise to end the start
    device: torch.device,
) -> None:
    started = last = time.perf_counter()
    before = _taken(device)
    done = 0
    for rows in captures:
        check()
        done += 1
        now = time.perf_counter()
        if now - last >= PROGRESS_EVERY_S:
            last = now
            log.info("captured %d of %d %s, now %d rows", done, len(buckets), what, rows)
    log.info(
        "%d %s of up to %d rows took %.1f s and %.0f MiB of buffers",
        done,
        what,
        max(buckets, default=0),
        time.perf_counter() - started,
        (_taken(device) - before) / 2**20,
    )


def _taken(device: torch.device) -> int:
    """Bytes of buffers; free memory would tell of other processes too."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
