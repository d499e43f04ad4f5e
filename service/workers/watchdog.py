"""When a worker that does not answer is taken for dead."""

from dataclasses import dataclass

from stemserve.service.batching.steps.step_speed import StepSpeed

SLOWER = 10.0  # than steps of its size have been


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeout:
    """A step may take `SLOWER` times what is expected of it, within these bounds."""

    least_s: float  # a pause of the machine, or a kernel that is compiled, is no fault
    most_s: float  # and before anything is known


class Watchdog:
    def __init__(self, timeout: StepTimeout) -> None:
        self._timeout = timeout
        self._speed = StepSpeed(max_step_tokens=1 << 30)  # each estimate is of one step

    def observe(self, rows: int, seconds: float) -> None:
        self._speed.observe(rows, seconds)

    def expected_s(self, rows: int, steps: int = 1) -> float | None:
        """Of a burst of so many steps; None before enough is known."""
        expected_s = self._speed.seconds(rows)
        return None if expected_s is None else steps * expected_s

    def limit_s(self, rows: int, steps: int = 1) -> float:
        """Of a burst of so many steps."""
        expected_s, most_s = self.expected_s(rows, steps), steps * self._timeout.most_s
        if expected_s is None:
            return most_s
        return min(most_s, max(self._timeout.least_s, SLOWER * expected_s))
