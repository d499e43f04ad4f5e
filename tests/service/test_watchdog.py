"""When a worker that does not answer is given up."""

import pytest

from stemserve.service.workers.watchdog import SLOWER, StepTimeout, Watchdog

TIMEOUT = StepTimeout(least_s=2.0, most_s=300.0)


def test_before_anything_is_known_a_step_may_take_long() -> None:
    assert Watchdog(TIMEOUT).limit_s(1) == 300.0


def test_a_step_may_take_ten_times_what_its_size_has_taken() -> None:
    dog = Watchdog(TIMEOUT)
    for rows in (1, 64, 512) * 4:
        dog.observe(rows, 0.1 + rows * 0.001)
    assert dog.limit_s(512) == pytest.approx(SLOWER * 0.612)
    assert dog.limit_s(1) == 2.0
    assert dog.limit_s(1 << 20) == 300.0


def test_a_burst_may_take_as_long_as_its_steps_one_by_one() -> None:
    dog = Watchdog(TIMEOUT)
    assert dog.limit_s(64, steps=8) == 8 * 300.0
    for _ in range(8):
        dog.observe(64, 0.5)
    assert dog.limit_s(64, steps=8) == pytest.approx(8 * SLOWER * 0.5)
    assert dog.limit_s(1 << 20, steps=8) == 8 * 300.0
