"""Say when tokens that wait for others are sent: for all streams of the process at once.

Streams that are woken together cost the loop and the transport less than one after the other.
"""

import asyncio
import time
from collections.abc import Callable


class MessageClock:
    """Of one event loop. Between two moments lie at least `delay_s` seconds, asked for each time;
    nobody waits longer than that."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._waiting: dict[Callable[[], None], None] = {}  # in their order
        self._last_s = 0.0  # monotonic
        self._timer: asyncio.Handle | None = None

    def wait(self, release: Callable[[], None]) -> None:
        """`release` is called once, when the moment has come; never inside of this call."""
        self._waiting[release] = None
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._last_s + self._delay_s() - time.monotonic()
        if wait_s > 0:
            self._timer = loop.call_later(wait_s, self._release)
        else:
            self._timer = loop.call_soon(self._release)

    def _release(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, {}, None
        self._last_s = time.monotonic()
        for release in waiting:
            release()
