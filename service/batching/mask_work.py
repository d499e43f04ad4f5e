"""Masks of constraints that take long to make: beside the step loop, those of one result together.

One by one they would make steps of one row each of samples that could go on side by side.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Run = Callable[[Callable[[], None]], object]
T = TypeVar("T")


def run_here(work: Callable[[], None]) -> None:
    work()


class Aside(Generic[T]):
    """Work of one job, and what came of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: T | None = None
        self._error: Exception | None = None
        self.is_done = False  # together with the rest of its result

    def run(self) -> None:
        """In whatever thread; what it raises is for the job."""
        try:
            self._found = self._work()
        except Exception as error:
            self._error = error

    def take(self) -> T:
        """Once it is done. Raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found


class MaskWork:
    def __init__(self, run: Run) -> None:
        """`run` is given a round of work: it does it at once, or has a thread do it and then wakes
        whoever plans."""
        self._run = run
        self._next: list[tuple[int, Aside[Any]]] = []
        self._rounds: list[list[tuple[int, Aside[Any]]]] = []  # that were sent

    def add(self, arrival: int, work: Callable[[], T]) -> Aside[T]:
        """For the job with this number. Begins with `send`."""
        aside = Aside(work)
        self._next.append((arrival, aside))
        return aside

    def send(self) -> None:
        """All that was added is one round."""
        if not self._next:
            return
        work, self._next = self._next, []
        self._rounds.append(work)

        def run() -> None:
            for _, aside in work:
                aside.run()
            for _, aside in work:
                aside.is_done = True

        self._run(run)

    def take_done(self) -> list[int]:
        """Jobs whose work is done since the last call."""
        done = [work for work in self._rounds if work[-1][1].is_done]
        self._rounds = [work for work in self._rounds if not work[-1][1].is_done]
        return list(dict.fromkeys(arrival for work in done for arrival, _ in work))
