"""The first SIGTERM or SIGINT asks the server to drain, the second ends it at once."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

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
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, signals._on_signal, number)
        try:
            yield signals
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def ask(self) -> None:
        """As a first signal does. The next one is not for the loop, which may wait for a thread."""
        self._asked.set()
        for number in _SIGNALS:
            signal.signal(number, self._end)

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
        if self._asked.is_set():  # both came before the loop's turn
            self._end(number)
        _log.info("%s: draining", signal.Signals(number).name)
        self.ask()

    def _end(self, number: int, frame: FrameType | None = None) -> NoReturn:
        try:
            _log.warning("second %s: ending at once", signal.Signals(number).name)
            self._end_now()
        finally:  # it may have come in the middle of a line of the log
            os._exit(128 + number)
