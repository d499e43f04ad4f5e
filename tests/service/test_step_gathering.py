"""Steps that wait for jobs to come while the worker is busy anyway."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.step_loop_rig import CountingBatcher, Rig, facts, job
from tests.service.toy_jobs import generate_job, label_job, random_tokens

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.step_speed import MIN_STEPS
from stemserve.service.workers.attached_worker import PLAN_S, SURE_PART, AttachedWorker
from stemserve.service.workers.step_commands import Lost
from stemserve.service.workers.watchdog import StepTimeout, Watchdog

FOREVER_S = 1e6


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(step_timeout_s=1e9)
    rig.attach()
    yield rig
    rig.loop.stop()


def learn(rig: Rig, seconds: float) -> None:
    """Steps of one job that take so long; nothing is in flight afterwards."""
    for number in range(MIN_STEPS):
        rig.submit(job(f"known-{number}"))
        rig.answer(rig.next_plan(), seconds=seconds)
        rig.next_news()
    rig.batchers[0].may_gather = True


def test_jobs_that_come_while_a_long_step_runs_are_planned_together(rig: Rig) -> None:
    learn(rig, FOREVER_S)
    rig.submit(job("first"))
    running = rig.next_plan()
    for name in ("a", "b", "c"):
        rig.submit(job(name))
        assert rig.ask(lambda batcher: batcher.has_work)
    assert rig.plans.empty()
    rig.answer(running)
    rig.next_plan()
    assert rig.batchers[0].steps[-1] == ["a", "b", "c"]


def test_what_waits_is_planned_before_the_step_ends_though_nothing_comes(rig: Rig) -> None:
    learn(rig, 0.3)
    rig.submit(job("first"))
    running = rig.next_plan()
    rig.submit(job("a"))
    assert rig.next_plan() == running + 1
    assert rig.batchers[0].steps[-1] == ["a"]


def test_a_step_whose_time_nobody_knows_is_followed_at_once(rig: Rig) -> None:
    rig.ask(lambda batcher: None)
    rig.batchers[0].may_gather = True
    rig.submit(job("first"))
    rig.next_plan()
    rig.submit(job("a"))
    rig.next_plan()
    assert rig.batchers[0].steps == [["first"], ["a"]]


def test_beside_what_decodes_nothing_is_held_back(rig: Rig) -> None:
    learn(rig, FOREVER_S)
    rig.batchers[0].may_gather = False
    rig.submit(job("first", tokens=2))
    assert [rig.next_plan(), rig.next_plan()] == [MIN_STEPS, MIN_STEPS + 1]


def test_the_inbox_says_how_long_the_next_step_waits(rig: Rig) -> None:
    learn(rig, FOREVER_S)
    rig.ask(lambda batcher: None)
    assert rig.inbox.gathers_until_s == 0.0
    rig.submit(job("first"))
    running = rig.next_plan()
    rig.ask(lambda batcher: None)
    assert rig.inbox.gathers_until_s > SURE_PART * FOREVER_S - PLAN_S
    rig.answer(running)
    rig.next_news()
    rig.ask(lambda batcher: None)
    assert rig.inbox.gathers_until_s == 0.0


def test_held_jobs_fail_with_the_worker(rig: Rig) -> None:
    learn(rig, FOREVER_S)
    rig.submit(job("first"))
    rig.next_plan()
    rig.submit(job("a"))
    rig.inbox.put(Lost(generation=1, reason="gone"))
    assert {event.request_id for event in rig.next_news()} == {"first", "a"}


def test_the_next_plan_is_due_shortly_before_all_that_was_sent_is_done() -> None:
    dog = Watchdog(StepTimeout(least_s=1.0, most_s=100.0))
    for rows in (100, 200, 300, 400):
        dog.observe(rows, 1.0 + rows * 0.01)
    worker = AttachedWorker(
        generation=1,
        worker=Sink(),
        batcher=CountingBatcher(facts()),
        steps_in_flight=3,
        watchdog=dog,
    )
    assert worker.plan_by_s == 0.0
    worker.send(plan_of(100), now=50.0)
    assert worker.plan_by_s == pytest.approx(50.0 + SURE_PART * 2.0 - PLAN_S)
    worker.send(plan_of(300), now=51.0)
    assert worker.plan_by_s == pytest.approx(50.0 + SURE_PART * 6.0 - PLAN_S)
    worker.answered(2.5, now=52.5)
    assert worker.plan_by_s == pytest.approx(52.5 + SURE_PART * 4.0 - PLAN_S)


class Sink:
    def send(self, plan: worker_pb2.StepPlan) -> None:
        pass


def plan_of(rows: int) -> worker_pb2.StepPlan:
    return worker_pb2.StepPlan(token_ids=np.zeros(rows, np.int32).tobytes())


def test_calls_join_a_step_that_is_planned_later_as_long_as_they_fit() -> None:
    rig = make_rig(budget=64)
    assert rig.batcher.may_gather
    assert not rig.batcher.has_work
    rig.submit(label_job("a", [random_tokens(1, 30)], [[1, 2]], [3]))
    assert rig.batcher.has_work
    assert rig.batcher.may_gather
    rig.submit(label_job("b", [random_tokens(2, 40)], [[1, 2]], [3]))
    assert not rig.batcher.may_gather
    rig.plan()
    assert rig.batcher.may_gather  # the rest of b's rows
    rig.plan()
    assert not rig.batcher.has_work


def test_no_step_is_put_off_from_the_first_prompt_to_the_last_token() -> None:
    rig = make_rig()
    rig.submit(generate_job("g", [1, 2, 3], max_new_tokens=2))
    while "g" in rig.answers and rig.answers["g"].last is None:
        assert not rig.batcher.may_gather
        rig.plan()
        rig.answer()
    assert rig.batcher.may_gather
    rig.submit(generate_job("h", [1, 2, 3], max_new_tokens=2))
    rig.batcher.cancel("h")
    assert rig.batcher.may_gather
