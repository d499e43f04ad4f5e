"""Noticing a step loop that hangs."""

import asyncio
from concurrent.futures import Future

import pytest

from stemserve.service.errors import NotReady
from stemserve.service.request import Load
from stemserve.service.serving.health import Health
from stemserve.service.workers.step_commands import Ask, Inbox
from stemserve.service.workers.step_monitor import watch_step_loop
from stemserve.service.workers.threaded_engine import ThreadedEngine

LOAD = Load(
    queued_requests=1,
    running_requests=2,
    queued_tokens=3,
    free_pages=4,
    cached_pages=5,
    used_pages=6,
)


def next_reply(inbox: Inbox) -> Future[Load] | None:
    command = inbox.next()
    if command is None:
        return None
    assert isinstance(command, Ask)
    assert command.reply.set_running_or_notify_cancel() or command.reply.cancelled()
    return command.reply


async def test_b55_a_step_loop_that_hangs_ends_readiness_and_liveness_until_it_answers() -> None:
    inbox = Inbox()
    serving: list[bool] = []
    health = Health([], note_serving=serving.append)
    health.open()
    health.set_worker_ready(True)
    seen: list[Load] = []
    watching = asyncio.create_task(
        watch_step_loop(ThreadedEngine(inbox), health, seen.append, period_s=0.01, patience_s=0.05)
    )
    async with asyncio.timeout(30):
        while serving[-1]:
            await asyncio.sleep(0.01)
        assert not health.serving
        while not health.serving:
            await asyncio.sleep(0)
            reply = next_reply(inbox)
            if reply is not None and not reply.cancelled():
                reply.set_result(LOAD)
    watching.cancel()
    assert seen == [LOAD]


async def test_a_step_loop_without_a_worker_is_alive() -> None:
    inbox = Inbox()
    health = Health([], note_serving=lambda serving: None)
    watching = asyncio.create_task(
        watch_step_loop(
            ThreadedEngine(inbox), health, lambda load: None, period_s=0.001, patience_s=30.0
        )
    )
    for _ in range(3):
        while (reply := next_reply(inbox)) is None:
            await asyncio.sleep(0.001)
        reply.set_exception(NotReady("no worker"))
    assert not watching.done()
    health.open()
    health.set_worker_ready(True)
    assert health.serving
    watching.cancel()


async def test_a_watch_goes_on_after_a_fault_of_what_it_is_told() -> None:
    inbox, told = Inbox(), 0

    def record(load: Load) -> None:
        nonlocal told
        told += 1
        raise ValueError("a fault")

    health = Health([], note_serving=lambda serving: None)
    watching = asyncio.create_task(
        watch_step_loop(ThreadedEngine(inbox), health, record, period_s=0.01, patience_s=30.0)
    )
    async with asyncio.timeout(20):
        while told < 2:
            if (reply := next_reply(inbox)) is not None:
                reply.set_result(LOAD)
            await asyncio.sleep(0.001)
    watching.cancel()


@pytest.mark.parametrize("turns", range(8))
async def test_a_watch_ends_when_cancelled_at_the_moment_of_an_answer(turns: int) -> None:
    """A drain waits for it: one that goes on holds the server up for good."""
    inbox = Inbox()
    health = Health([], note_serving=lambda serving: None)
    watching = asyncio.create_task(
        watch_step_loop(
            ThreadedEngine(inbox), health, lambda load: None, period_s=0.001, patience_s=30.0
        )
    )
    while (reply := next_reply(inbox)) is None:
        await asyncio.sleep(0.001)
    reply.set_exception(NotReady("no worker"))
    for _ in range(turns):
        await asyncio.sleep(0)
    watching.cancel()
    done, _ = await asyncio.wait({watching}, timeout=0.5)
    assert done
