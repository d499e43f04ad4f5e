"""Compilations of several tenants: whose turn it is, and how many places each can take."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from stemserve.service.constraints.compile_queue import MOST_WAITING, CompileQueue
from stemserve.service.errors import QueueFull

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def gate(executor: ThreadPoolExecutor) -> Iterator[threading.Event]:
    """The thread is busy until it is set."""
    gate = threading.Event()
    executor.submit(gate.wait)
    yield gate
    gate.set()


def noting(done: list[str], name: str) -> Callable[[], str]:
    def run() -> str:
        done.append(name)
        return name

    return run


async def test_each_tenant_has_its_turn_whoever_came_first(
    executor: ThreadPoolExecutor, gate: threading.Event
) -> None:
    queue, done = CompileQueue(executor), list[str]()
    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    results = [queue.submit(name[0], noting(done, name)) for name in names]
    gate.set()
    assert await asyncio.gather(*results) == names
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_no_tenant_takes_the_places_of_others(
    executor: ThreadPoolExecutor, gate: threading.Event
) -> None:
    queue = CompileQueue(executor, weights=WEIGHTS)
    results: list[asyncio.Future[None]] = []
    taken = Counter[str]()
    for tenant in ("a", "b", "c", "nobody"):
        try:
            while True:
                results.append(queue.submit(tenant, lambda: None))
                taken[tenant] += 1
        except QueueFull:
            pass
    # Half of the places are everybody's, and the first takes them; the rest is by weight.
    assert taken == {"a": MOST_WAITING * 5 // 8, "b": MOST_WAITING // 8, "c": MOST_WAITING // 4}
    gate.set()
    await asyncio.gather(*results)
    await queue.submit("nobody", lambda: None)


async def test_what_was_given_up_is_not_begun_and_leaves_its_place(
    executor: ThreadPoolExecutor, gate: threading.Event
) -> None:
    queue, done = CompileQueue(executor), list[str]()
    results = [queue.submit("a", noting(done, str(n))) for n in range(MOST_WAITING)]
    assert queue.withdraw(results[3]) and not queue.withdraw(results[3])
    assert not queue.withdraw(results[0])  # a thread has it
    results.append(queue.submit("a", noting(done, "more")))
    with pytest.raises(QueueFull):
        queue.submit("a", noting(done, "too many"))
    gate.set()
    ended = await asyncio.gather(*results, return_exceptions=True)
    assert isinstance(ended[3], asyncio.CancelledError)
    assert done == [str(n) for n in range(MOST_WAITING) if n != 3] + ["more"]


async def test_a_fault_of_one_is_its_own(executor: ThreadPoolExecutor) -> None:
    queue = CompileQueue(executor)
    results = [queue.submit("a", partial(divmod, 1, number)) for number in (1, 0, 1)]
    ended = await asyncio.gather(*results, return_exceptions=True)
    assert ended[0] == ended[2] == (1, 0) and isinstance(ended[1], ZeroDivisionError)


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_comes_and_goes_every_place_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    with ThreadPoolExecutor(2) as executor:
        queue = CompileQueue(executor, threads=2, weights=WEIGHTS)
        results: list[asyncio.Future[int]] = []
        for number in range(200):
            try:
                results.append(queue.submit(chance.choice("abcd"), partial(abs, number)))
            except QueueFull:
                await asyncio.sleep(0)
            if results and chance.random() < 0.3:
                queue.withdraw(chance.choice(results))
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        await asyncio.gather(*results, return_exceptions=True)
        again = [queue.submit("d", lambda: 0) for _ in range(MOST_WAITING // 2)]
        assert await asyncio.gather(*again) == [0] * len(again)


async def test_what_waits_when_the_server_ends_is_cancelled(gate: threading.Event) -> None:
    executor = ThreadPoolExecutor(1)
    queue = CompileQueue(executor)
    running, waiting = (queue.submit("a", lambda: 1) for _ in range(2))
    executor.shutdown(wait=False)
    assert await running == 1
    with pytest.raises(asyncio.CancelledError):
        await waiting
