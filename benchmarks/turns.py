"""Times of calls that compete, each measured in turn; what is near the best is measured longer."""

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

NEAR = 1.15  # times the best
NEAR_S = 0.4  # for which calls near the best go on, at least
PERCENTILE = 25  # what disturbs the host only ever adds to its time; calibration takes the same


def in_turns(
    timers: Mapping[str, Callable[[], float]],  # microseconds of a call, measured anew
    rounds: int,  # of all; those near the best take twice as many more
    near_s: float = NEAR_S,
) -> dict[str, float]:
    """Between calls near the best a choice is right or wrong, and a host's moods are as large as
    what separates launches that take 50 us: a few turns would judge these by chance."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    near, started, turn = _near_best(times), time.perf_counter(), 0
    while len(near) > 1 and (turn < 2 * rounds or time.perf_counter() - started < near_s):
        for name in near:
            times[name].append(timers[name]())
        turn += 1
    return {name: round(float(np.percentile(us, PERCENTILE)), 2) for name, us in times.items()}


def _near_best(times: Mapping[str, list[float]]) -> list[str]:
    middles = {name: statistics.median(us) for name, us in times.items()}
    best = min(middles.values(), default=0.0)
    return [name for name, us in middles.items() if us <= NEAR * best]
