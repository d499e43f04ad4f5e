"""How many rows a step may have: fewer after the worker's memory ran out, and slowly more again."""

from collections.abc import Callable

LONG_STEP = 4096  # rows; a GPU takes a good part of the time of so many for a step of a few
END_PART = 9  # of a long step
WHOLE_ROWS = 256  # a worker's graphs of long steps have multiples of them
LEAST_PART = 16  # of the limit: steps do not get smaller than that
GROWTH_PART = 64  # of what has fitted, after each step that filled its budget


class StepBudget:
    def __init__(self, most: int) -> None:
        self.rows = most
        self._most = most
        self._least = max(1, most // LEAST_PART)

    def of_step(self, pending: Callable[[], int]) -> int:
        """Rows that a step may have; `pending`: how many there are in all.

        The end of a long step is for what would else leave a few rows to a step of their own.
        """
        if self.rows < LONG_STEP or pending() <= self.rows:
            return self.rows
        return (self.rows - self.rows // END_PART) // WHOLE_ROWS * WHOLE_ROWS

    def observe(self, rows: int, shortages: int) -> None:
        """A step of some rows was answered; memory ran out so often."""
        if shortages:
            # Of the step's rows: two that were in flight at once halve the budget once.
            self.rows = min(self.rows, max(self._least, rows // 2))
        elif 2 * rows > self.rows:
            self.rows = min(self._most, self.rows + max(1, self.rows // GROWTH_PART))
