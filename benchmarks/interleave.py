"""Time the sides of a comparison turn by turn, so that a busy machine disturbs all alike."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

import numpy as np
from agreement import largest_difference, refuse_beyond_tolerance
from numpy.typing import NDArray
from rich.progress import Progress

Work = TypeVar("Work")
LogProbs = NDArray[np.floating[Any]]
# Does the work once: its log-probabilities, and the seconds that count.
Side = Callable[[Work], tuple[LogProbs, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Generic[Work]):
    """Sides that do the same work. The first is ours; the others must agree with it."""

    title: str
    sides: Mapping[str, Side[Work]]
    work: Iterator[Work]  # one a round
    warm_up_rounds: int = 1  # checked, but not counted

    def run(self, *, repeats: int, progress: Progress) -> "Times":
        rounds = repeats + self.warm_up_rounds
        seconds: dict[str, list[float]] = {name: [] for name in self.sides}
        differences: list[float] = []
        task = progress.add_task(self.title, total=rounds * len(self.sides))
        for number in range(rounds):
            work = next(self.work)
            answers: list[LogProbs] = []
            for name, side in self.sides.items():
                progress.update(task, description=f"{self.title}: {name}")
                answer, taken = side(work)
                answers.append(answer)
                if number >= self.warm_up_rounds:
                    seconds[name].append(taken)
                progress.advance(task)
            for answer in answers[1:]:
                differences.append(largest_difference(answers[0], answer))
                refuse_beyond_tolerance(self.title, differences[-1])
        progress.update(task, description=self.title)
        return Times(seconds=seconds, max_difference=max(differences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    seconds: Mapping[str, list[float]]  # by side, one value a counted round
    max_difference: float  # of a log-probability, over all rounds

    def median(self, side: str) -> float:
        return median(self.seconds[side])

    def text(self, title: str) -> str:
        lines = [f"{title}: answers agree, log-probabilities to {self.max_difference:.1e}"]
        for side, values in self.seconds.items():
            lines.append(f"  {side}: {median(values):.4f} s (median of {len(values)})")
        return "\n".join(lines)

    def summary(self) -> dict[str, Any]:
        """For a result file, rounded to what a clock is worth."""
        return {
            "max_logprob_difference": float(f"{self.max_difference:.1e}"),
            "seconds": {
                side: {
                    "median": round(median(values), 5),
                    "repeats": [round(value, 5) for value in values],
                }
                for side, values in self.seconds.items()
            },
        }
