"""Calls that are timed in turns: how often, and what counts."""

import random
from collections.abc import Callable

import pytest
from turns import in_turns


class Timed:
    """Times of a call, in the order in which they are asked for; the last goes on."""

    def __init__(self, *us: float) -> None:
        self._us = list(us)
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self._us[min(self.asked, len(self._us)) - 1]


def test_calls_near_the_best_are_timed_three_times_as_often() -> None:
    calls = {"best": Timed(100), "near": Timed(114), "far": Timed(116)}
    assert in_turns(calls, 3, near_s=0) == {name: call() for name, call in calls.items()}
    assert [call.asked - 1 for call in calls.values()] == [9, 9, 3]


def test_a_call_that_competes_with_none_is_timed_once_a_round() -> None:
    calls = {"best": Timed(10), "far": Timed(1000)}
    in_turns(calls, 2, near_s=60)
    assert [call.asked for call in calls.values()] == [2, 2]
    assert in_turns({}, 2) == {}


def test_near_calls_go_on_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(now) * 0.1)
    calls = {"one": Timed(10), "other": Timed(10.1)}
    in_turns(calls, 1, near_s=2.05)
    assert (
        calls["one"].asked == calls["other"].asked == 1 + 2 + 20
    )  # the first two without a look at the clock


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_is_busy_half_of_the_time_does_not_change_the_order(seed: int) -> None:
    rng = random.Random(seed)

    def timer(us: float) -> Callable[[], float]:
        return lambda: us * rng.choice([1, 1, rng.uniform(1, 2), rng.uniform(1, 2)])

    found = in_turns({"slow": timer(51), "fast": timer(49)}, 20, near_s=0)
    assert found["fast"] < found["slow"] < 1.1 * 51
