"""Masks of constraints that take long to make: beside the step loop, those of one result together.

One by one they would make steps of one row each of samples that could go on side by side. A job
whose masks took very long the last time is alone: it shall hold nobody else up.
"""

import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

SLOW_S = 0.02  # of a job's masks in one step
MOST_SLOW = 1024  # jobs that are remembered

T = TypeVar("T")


class Run(Protocol):
    """Does a round of work at once, or has a thread do it and then wakes whoever plans. What is
    slow must not hold up what is not."""

    def __call__(self, work: Callable[[], None], *, slow: bool) -> object: ...


def run_here(work: Callable[[], None], *, slow: bool) -> None:
    work()


class Aside(Generic[T]):
    """Work of one job, and what came of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: T | None = None
        self._error: Exception | None = None
        self.seconds = 0.0  # that it took
        self.is_done = False  # together with the rest of its result

    def run(self) -> None:
        """In whatever thread; what it raises is for the job."""
        started = time.perf_counter()
        try:
            self._found = self._work()
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - started

    def take(self) -> T:
        """Once it is done. Raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found


Round = list[tuple[int, Aside[Any]]]  # by the arrival numbers of jobs


class MaskWork:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._next: Round = []
        self._sent: list[Round] = []
        self._slow: dict[int, None] = {}  # jobs, in the order in which they were found to be

    def add(self, arrival: int, work: Callable[[], T]) -> Aside[T]:
        """For the job with this number. Begins with `send`."""
        aside = Aside(work)
        self._next.append((arrival, aside))
        return aside

    def send(self) -> None:
        """All that was added is one round, but what slow jobs have: each has one of its own."""
        added, self._next = self._next, []
        together = [piece for piece in added if piece[0] not in self._slow]
        if together:
            self._send(together, slow=False)
        for job in dict.fromkeys(arrival for arrival, _ in added if arrival in self._slow):
            self._send([piece for piece in added if piece[0] == job], slow=True)

    def take_done(self) -> list[int]:
        """Jobs whose work is done since the last call."""
        done = [work for work in self._sent if work[-1][1].is_done]
        if not done:
            return []
        self._sent = [work for work in self._sent if not any(work is each for each in done)]
        seconds: dict[int, float] = {}
        for arrival, aside in (piece for work in done for piece in work):
            seconds[arrival] = seconds.get(arrival, 0.0) + aside.seconds
        for arrival, taken in seconds.items():
            self._slow.pop(arrival, None)
            if taken > SLOW_S:
                self._slow[arrival] = None
        while len(self._slow) > MOST_SLOW:
            del self._slow[next(iter(self._slow))]
        return list(seconds)

    def _send(self, work: Round, *, slow: bool) -> None:
        self._sent.append(work)

        def run() -> None:
            for _, aside in work:
                aside.run()
            for _, aside in work:
                aside.is_done = True

        self._run(run, slow=slow)
