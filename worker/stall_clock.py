"""How long the step has run that has run longest: whether a worker still gets on."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class StallClock:
    """On a GPU a step is launched in one thread and waited for in another; either may hang."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` in seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}

    @contextmanager
    def running(self) -> Generator[None]:
        key = object()
        with self._lock:
            self._since[key] = self._now()
        try:
            yield
        finally:
            with self._lock:
                del self._since[key]

    def longest_s(self) -> float:
        """Seconds, 0 while nothing runs."""
        with self._lock:
            since = min(self._since.values(), default=None)
        return 0.0 if since is None else self._now() - since
