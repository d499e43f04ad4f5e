"""Make masks of constraints beside the step loop, which plans with them when they are there."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from stemserve.service.workers.step_commands import Inbox


class MaskThread:
    """The library that makes masks lets other threads run meanwhile."""

    def __init__(
        self, executor: ThreadPoolExecutor, inbox: Inbox, *, note: Callable[[float], object]
    ) -> None:
        """The executor's only thread does nothing else. `note` hears how many seconds it took."""
        self._executor = executor
        self._inbox = inbox
        self._note = note

    def run(self, work: Callable[[], None]) -> None:
        """Returns at once; the step loop is called when it is done."""
        done = self._executor.submit(self._timed, work)
        done.add_done_callback(lambda _: self._inbox.call())

    def _timed(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        self._note(time.perf_counter() - started)
