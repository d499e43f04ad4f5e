"""Full collections: none while calls run, one when there is time."""

import asyncio
import gc
from collections.abc import Generator

import pytest
from tests.service.waiting import until

from stemserve.service.serving.garbage import collect_when_idle, put_off_full_collections


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


@pytest.fixture(autouse=True)
def collector() -> Generator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def make_garbage() -> None:
    kept = [Cycle() for _ in range(30_000)]
    for cycle in kept:
        cycle.itself = cycle


def test_no_full_collection_comes_by_itself() -> None:
    put_off_full_collections()
    before, kept = full_collections(), list[list[Cycle]]()
    for _ in range(400):
        kept.append([Cycle() for _ in range(2_000)])
    assert full_collections() == before


async def test_what_calls_left_is_collected_once_they_are_done() -> None:
    put_off_full_collections()
    idle = False
    before = full_collections()
    task = asyncio.create_task(collect_when_idle(lambda: idle, period_s=0.01))
    await asyncio.sleep(0)
    make_garbage()
    await asyncio.sleep(0.1)
    assert full_collections() == before
    idle = True
    await until(lambda: full_collections() == before + 1)
    await asyncio.sleep(0.1)
    assert full_collections() == before + 1  # nothing was made since
    task.cancel()


async def test_a_server_that_is_never_idle_collects_nevertheless() -> None:
    put_off_full_collections()
    before = full_collections()
    task = asyncio.create_task(collect_when_idle(lambda: False, period_s=0.01, most_s=0.05))
    await asyncio.sleep(0.06)
    make_garbage()
    await until(lambda: full_collections() > before)
    task.cancel()


async def test_a_moment_between_two_calls_is_no_idleness() -> None:
    put_off_full_collections()
    before = full_collections()
    task = asyncio.create_task(collect_when_idle(lambda: True, period_s=0.05))
    for _ in range(15):
        make_garbage()
        await asyncio.sleep(0.01)
    assert full_collections() == before
    await until(lambda: full_collections() == before + 1)
    task.cancel()
