"""Waiting for what another task or thread does."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 10.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
