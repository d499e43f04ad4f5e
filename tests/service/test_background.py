"""Work beside the calls: its end, and its faults."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from stemserve.service.serving.background import run_until_closed


async def test_it_ends_with_the_stack() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncExitStack() as stack:
        run_until_closed(stack, work())
        await asyncio.sleep(0)
        assert not ended.is_set()
    await ended.wait()


async def test_a_fault_is_told_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("a fault")

    async with AsyncExitStack() as stack:
        run_until_closed(stack, work())
        async with asyncio.timeout(20):
            while "RuntimeError: a fault" not in caplog.text:
                await asyncio.sleep(0.001)
