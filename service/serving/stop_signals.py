"""The first SIGTERM or SIGINT asks the server to drain, the second ends it at once."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Stopped(Exception):
    """The server was told to stop before it was ready."""


class StopSignals:
    def __init__(self, end_now: Callable[[], None]) -> None:
        self._end_now = end_now
        self._asked = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def watched(cls, end_now: Callable[[], None]) -> AsyncGenerator[Self]:
        """`end_now` releases what must not outlive the process."""
        signals = cls(end_now)
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, signals._on_signal, number)
        try:
            yield signals
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def ask(self) -> None:
        """As a first signal does."""
        self._asked.set()

    async def wait(self) -> None:
        await self._asked.wait()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises Stopped, with `work` cancelled, if a signal comes first."""
        working = asyncio.create_task(work)
        waiting = asyncio.create_task(self.wait())
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait((working,))
        raise Stopped

    def _on_signal(self, number: int) -> None:
        if self._asked.is_set():
            _log.warning("second %s: ending at once", signal.Signals(number).name)
            self._end_now()
            os._exit(128 + number)
        _log.info("%s: draining", signal.Signals(number).name)
        self._asked.set()
