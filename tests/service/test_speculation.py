"""Drafts are verified where that brings tokens sooner, by what steps were seen to take."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from stemserve.service.batching.jobs.decoding_progress import DecodingProgress
from stemserve.service.batching.samples.speculation import (
    FORGET_AFTER,
    MOST_COST,
    REST,
    DraftPolicy,
    Speculation,
    Stage,
)
from stemserve.service.batching.steps.step_builder import IssuedStep, Share

NONE = np.zeros(0, np.int32)


@dataclass
class Decoding:
    """What is asked of a job that decodes."""

    num_live: int = 1
    draft_tokens: int = 8
    expected_tokens: float = 0.0
    in_flight: int = 0


def step(
    rows: int, *, samples: int = 0, repeat: int = 1, jobs: tuple[int, ...] = (1,)
) -> IssuedStep:
    """`samples`: whose drafts it verifies, with all its rows."""
    return IssuedStep(
        step_id=1,
        shares={job: Share() for job in jobs},
        num_rows=rows,
        decode_rows=rows,
        draft_tokens=rows - samples if samples else 0,
        repeat=repeat,
        gather_rows=NONE,
        num_gather_ids=0,
        classify_rows=NONE,
        sample_rows=NONE,
        span_starts=NONE,
        span_jobs=NONE,
    )


class Clocked:
    """Steps that follow one another closely."""

    def __init__(self, least_gain: float = 1.2) -> None:
        self.speculation = Speculation(DraftPolicy(least_gain=least_gain))
        self.now = 100.0

    def ran(self, issued: IssuedStep, seconds: float, wait: float = 0.0) -> None:
        self.now += seconds + wait
        self.speculation.learn(issued, seconds, self.now)

    def stage(self, *jobs: Decoding, nobody_waits: bool = True) -> Stage:
        decoding = [cast(DecodingProgress, job) for job in jobs]
        return self.speculation.stage(decoding, nobody_waits=nobody_waits)


@pytest.fixture
def clocked() -> Clocked:
    """Plain steps take 10 ms, those of 9 rows 20 ms."""
    found = Clocked()
    found.ran(step(1), 0.01)
    found.ran(step(1), 0.01)
    for _ in range(3):
        found.ran(step(9, samples=1), 0.02)
    return found


@pytest.mark.parametrize(("expected", "gain"), [(1.3, 1.15), (1.5, 1.25), (0.0, 0.5), (7.0, 4.0)])
def test_drafts_begin_where_they_are_expected_to_pay(
    clocked: Clocked, expected: float, gain: float
) -> None:
    stage = clocked.stage(Decoding(expected_tokens=expected))
    assert stage is (Stage.VERIFY if gain >= 1.2 else Stage.PLAIN)


def test_they_go_on_until_little_is_gained(clocked: Clocked) -> None:
    assert clocked.stage(Decoding(expected_tokens=1.5)) is Stage.VERIFY
    assert clocked.stage(Decoding(expected_tokens=1.25)) is Stage.VERIFY
    assert clocked.stage(Decoding(expected_tokens=1.1)) is Stage.PLAIN
    assert clocked.stage(Decoding(expected_tokens=1.25)) is Stage.PLAIN


def test_they_do_not_begin_again_at_once(clocked: Clocked) -> None:
    assert clocked.stage(Decoding(expected_tokens=1.5)) is Stage.VERIFY
    assert clocked.stage(Decoding(expected_tokens=0)) is Stage.PLAIN
    for _ in range(REST):
        assert clocked.stage(Decoding(expected_tokens=8)) is Stage.PLAIN
        clocked.ran(step(1), 0.01)
    assert clocked.stage(Decoding(expected_tokens=8)) is Stage.VERIFY


def test_what_is_in_flight_is_awaited(clocked: Clocked) -> None:
    assert clocked.stage(Decoding(expected_tokens=5, in_flight=1)) is Stage.WAIT


def test_nothing_is_tried_before_the_speed_of_plain_steps_is_known() -> None:
    assert Clocked().stage(Decoding(expected_tokens=8)) is Stage.PLAIN


def test_nothing_is_tried_while_others_wait(clocked: Clocked) -> None:
    assert clocked.stage(Decoding(expected_tokens=8), nobody_waits=False) is Stage.PLAIN


def test_who_has_no_drafts_is_not_slowed(clocked: Clocked) -> None:
    beside = Decoding(draft_tokens=0)
    assert clocked.stage(Decoding(expected_tokens=8), beside) is Stage.PLAIN
    for _ in range(5):  # rows cost nothing
        clocked.ran(step(9, samples=1), 0.0101)
        clocked.ran(step(2), 0.01)
    assert clocked.stage(Decoding(expected_tokens=8), beside) is Stage.VERIFY


def test_what_a_wait_costs_counts(clocked: Clocked) -> None:
    asking = Decoding(expected_tokens=2.0)
    assert clocked.stage(asking) is Stage.VERIFY
    for _ in range(5):
        clocked.ran(step(9, samples=1), 0.02, wait=0.02)
    assert clocked.stage(asking) is Stage.PLAIN


def test_a_pause_between_calls_is_no_cost_of_drafts(clocked: Clocked) -> None:
    clocked.ran(step(9, samples=1, jobs=(2,)), 0.02, wait=9.0)
    assert clocked.stage(Decoding(expected_tokens=2.0)) is Stage.VERIFY


def test_a_burst_is_as_fast_as_each_of_its_steps() -> None:
    clocked = Clocked()
    clocked.ran(step(1), 0.01)
    for _ in range(5):
        clocked.ran(step(1, repeat=8), 0.016)
    for _ in range(3):
        clocked.ran(step(9, samples=1), 0.006)
    assert clocked.stage(Decoding(expected_tokens=2.0)) is Stage.PLAIN
    assert clocked.stage(Decoding(expected_tokens=4.0)) is Stage.VERIFY


def test_the_first_steps_of_a_kind_may_be_slow() -> None:
    clocked = Clocked()
    clocked.ran(step(1), 0.01)
    asking = Decoding(expected_tokens=6.0)
    for seconds in (3.0, 0.02, 0.02):
        assert clocked.stage(asking) is Stage.VERIFY
        clocked.ran(step(9, samples=1), seconds)
    assert clocked.stage(asking) is Stage.VERIFY


@pytest.mark.parametrize("seconds", [0.1, 0.2, 3.0])
def test_steps_that_were_slow_are_tried_again_the_later_the_slower(seconds: float) -> None:
    clocked = Clocked()
    clocked.ran(step(1), 0.01)
    asking = Decoding(expected_tokens=6.0)
    for _ in range(3):
        assert clocked.stage(asking) is Stage.VERIFY
        clocked.ran(step(9, samples=1), seconds)
    wait = 0
    while clocked.stage(asking) is Stage.PLAIN:
        clocked.ran(step(1, repeat=8), 0.08)
        wait += 8
    assert FORGET_AFTER * min(seconds / 0.01, MOST_COST) <= wait + REST <= 40 * FORGET_AFTER
    clocked.ran(step(9, samples=1), seconds)
    assert clocked.stage(asking) is Stage.PLAIN


def test_many_samples_share_the_cost_of_a_step(clocked: Clocked) -> None:
    job = Decoding(num_live=4, draft_tokens=32, expected_tokens=4 * 3.0)
    for _ in range(5):
        clocked.ran(step(4), 0.01)
        clocked.ran(step(36, samples=4), 0.03)
    assert clocked.stage(job) is Stage.VERIFY
    job.expected_tokens = 4 * 2.0
    clocked.stage(Decoding(expected_tokens=0))
    assert clocked.stage(job) is Stage.PLAIN
