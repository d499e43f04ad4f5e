"""What is measured of a row, and how many milliseconds it comes to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stemserve.service.bench.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


def percentiles(seconds: Iterable[float]) -> Percentiles | None:
    values = np.fromiter(seconds, dtype=np.float64)
    if not values.size:
        return None
    p50, p90, p99 = np.percentile(values * 1e3, (50, 90, 99)).tolist()
    return Percentiles(p50=rounded(p50), p90=rounded(p90), p99=rounded(p99))


def median_ms(seconds: Iterable[float]) -> float | None:
    values = np.fromiter(seconds, dtype=np.float64)
    return rounded(float(np.median(values)) * 1e3) if values.size else None


def rounded(value: float) -> float:
    """To four digits: what a clock is worth."""
    return float(f"{value:.4g}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredRow:
    row: Row
    ours_ms: float | None  # None: nothing succeeded
    rounds_ms: tuple[float, ...]
    failures: int
    first_failure: str = ""
    times: Percentiles | None  # Score: of calls; Generate: between a call's tokens
    # Of the first round, to be compared with a peer's. Score: log-probabilities
    # [calls, items, labels]; Generate: of each request's first token [requests].
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    more: dict[str, float | bool | None] = field(default_factory=dict[str, float | bool | None])
