"""How many decode steps go to the worker at once."""

from stemserve.service.batching.steps.burst_size import BurstSize


def known(max_steps: int, step_s: float, *, max_seconds: float = 0.01) -> BurstSize:
    size = BurstSize(max_steps, max_seconds=max_seconds)
    for number in range(8):
        size.observe(64, 1, step_s, now=float(number))
    return size


def test_one_step_at_a_time_until_the_worker_is_known() -> None:
    size = BurstSize(8, max_seconds=1.0)
    assert size.steps(64) == 1
    for number in range(8):
        size.observe(64, 1, 0.001, now=float(number))
    assert size.steps(64) == 8


def test_a_burst_is_a_power_of_two_of_steps_that_end_in_time() -> None:
    found = [known(64, step_s).steps(64) for step_s in (0.0001, 0.0006, 0.001, 0.003, 0.006, 1.0)]
    assert found == [64, 16, 8, 2, 1, 1]
    assert known(5, 0.0001).steps(64) == 4


def test_steps_of_a_burst_are_as_long_as_steps_by_themselves() -> None:
    size = known(8, 0.001)
    for number in range(50):
        size.observe(64, 8, 0.008, now=10.0 + number)
    assert size.steps(64) == 8


def test_time_in_which_the_worker_was_at_the_step_before_does_not_count() -> None:
    size = BurstSize(8, max_seconds=0.01)
    for number in range(20):  # an answer each millisecond, of steps that were sent two ahead
        size.observe(64, 1, 0.002, now=1.0 + number * 0.001)
    assert size.steps(64) == 8


def test_a_slow_step_now_and_then_changes_nothing_and_slow_steps_do() -> None:
    size = known(8, 0.001)
    size.observe(64, 8, 4.0, now=20.0)
    assert size.steps(64) == 8
    for number in range(3):
        size.observe(64, 8, 0.08, now=21.0 + number)
    assert size.steps(64) == 1


def test_more_rows_than_were_seen_are_expected_to_take_longer() -> None:
    size = known(8, 0.001)
    assert [size.steps(rows) for rows in (1, 64, 128, 256, 1024)] == [8, 8, 4, 2, 1]


def test_time_in_which_the_worker_computed_prompts_does_not_count() -> None:
    size = BurstSize(8, max_seconds=0.01)
    for number in range(3):  # a step behind one of 8 ms
        size.answered(now=number + 0.008)
        size.observe(64, 1, 0.009, now=number + 0.009)
    assert size.steps(64) == 2  # not less than half of what the worker says is believed


def test_a_worker_that_takes_no_bursts_gets_none() -> None:
    assert not known(1, 0.0001).is_possible
    assert known(1, 0.0001).steps(64) == 1
