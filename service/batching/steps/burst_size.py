"""How many decode steps go to the worker at once."""

from collections import deque
from statistics import median

RECENT_STEPS = 5  # of whose times the median counts: one slow step changes nothing
FEWEST_STEPS = 3  # before anything is known


class BurstSize:
    """A burst spares the host what it does for each step, and delays whoever comes meanwhile."""

    def __init__(self, max_steps: int, *, max_seconds: float) -> None:
        self._max_steps = max_steps
        self._max_seconds = max_seconds
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)  # rows, seconds a step
        self._answered_s = 0.0

    @property
    def is_possible(self) -> bool:
        return self._max_steps > 1

    def answered(self, now: float) -> None:
        """A step of another kind was answered."""
        self._answered_s = now

    def observe(self, rows: int, steps: int, seconds: float, now: float) -> None:
        """A burst, or a step, of decode rows was answered.

        The worker counts from its launch, which may be before the end of the step before; then the
        time since that one's answer is the better measure, unless the two were read together.
        """
        gap = now - self._answered_s
        self._answered_s = now
        if gap > 0:
            seconds = max(seconds / 2, min(seconds, gap))
        if seconds > 0:
            self._recent.append((rows, seconds / steps))

    def steps(self, rows: int) -> int:
        """A power of two."""
        if len(self._recent) < FEWEST_STEPS:
            return 1
        seconds = median(known * max(1.0, rows / of_rows) for of_rows, known in self._recent)
        steps = 1
        while 2 * steps <= self._max_steps and 2 * steps * seconds <= self._max_seconds:
            steps *= 2
        return steps
