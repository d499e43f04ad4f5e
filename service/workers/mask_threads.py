"""Make masks of constraints beside the step loop, which plans with them when they are there."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from stemserve.service.workers.step_commands import Inbox


class MaskThreads:
    """Two: what is slow has one of its own. The library that makes masks lets other threads run
    meanwhile."""

    def __init__(self, inbox: Inbox, *, note: Callable[[float], object]) -> None:
        """The threads end with the context. `note` hears how many seconds each round took."""
        self._inbox = inbox
        self._note = note
        self._others = ThreadPoolExecutor(1, "masks")
        self._slow = ThreadPoolExecutor(1, "slow-masks")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for executor in (self._others, self._slow):
            executor.shutdown()

    def run(self, work: Callable[[], None], *, slow: bool) -> None:
        """Returns at once; the step loop is called when it is done."""
        executor = self._slow if slow else self._others
        done = executor.submit(self._timed, work)
        done.add_done_callback(lambda _: self._inbox.call())

    def _timed(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        self._note(time.perf_counter() - started)
