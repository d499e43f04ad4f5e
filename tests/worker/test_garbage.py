"""What a worker that serves does about garbage that only cycles keep."""

import gc
from collections.abc import Generator

import pytest

from stemserve.worker.garbage import GarbageClock, leave_out_what_lives


@pytest.fixture(autouse=True)
def collector() -> Generator[None]:
    callbacks = list(gc.callbacks)
    yield
    gc.unfreeze()
    gc.callbacks[:] = callbacks


def test_collections_look_at_nothing_that_was_there_before() -> None:
    kept = [[number] for number in range(1000)]
    looked_at = len(gc.get_objects())
    leave_out_what_lives()
    assert len(gc.get_objects()) < looked_at - len(kept)
    assert gc.get_freeze_count() > len(kept)


def test_the_clock_counts_what_collections_take() -> None:
    clock = GarbageClock()
    gc.collect()
    assert clock.seconds == 0
    clock.watch()
    gc.collect()
    first = clock.seconds
    assert first > 0
    gc.collect()
    assert clock.seconds > first
