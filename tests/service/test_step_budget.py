"""Steps after the worker's memory ran out, and rows for which there was none at all."""

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from tests.service.batcher_rig import Rig, make_rig
from tests.service.test_batcher_property import SETTINGS, Forest, Setting
from tests.service.toy_jobs import (
    assert_right,
    generate_job,
    label_job,
    likelihood_job,
    random_tokens,
)

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import pack_int32, unpack_int32
from stemserve.service.batching.steps.step_budget import StepBudget
from stemserve.service.errors import NeverFits
from stemserve.service.request import Job, Realm


def answer(rig: Rig, shortages: int = 0, starved: list[int] | None = None) -> None:
    plan = rig.in_flight.popleft()
    if starved:
        rig.worker.trusting_from = rig.plans[-1].step_id + 1
    result = rig.worker.run(plan)
    rig.worker.forget(plan, starved or [])
    result.memory_shortages = shortages
    result.starved_rows = pack_int32(starved or [])
    rig.take(rig.batcher.apply(result))


def num_rows(plan: worker_pb2.StepPlan | None) -> int:
    return 0 if plan is None else len(plan.token_ids) // 4


def finish(rig: Rig) -> None:
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_a_shortage_halves_the_steps_rows_and_full_steps_bring_them_back() -> None:
    budget = StepBudget(1024)
    for _ in range(2):  # both were in flight
        budget.observe(1000, 3)
    assert budget.rows == 500
    budget.observe(200, 0)
    assert budget.rows == 500
    turns = 0
    while budget.rows < 1024:
        budget.observe(budget.rows, 0)
        turns += 1
    assert 40 < turns < 60
    for _ in range(20):
        budget.observe(budget.rows, 1)
    assert budget.rows == 1024 // 16


def test_steps_are_smaller_after_a_shortage_and_every_answer_is_right() -> None:
    rig = make_rig(budget=64)
    jobs: list[Job] = [likelihood_job("a", [random_tokens(1, 200)], [random_tokens(2, 9)] * 20)]
    jobs += [generate_job(name, random_tokens(3, 50), samples=2) for name in "bc"]
    rig.submit(*jobs)
    assert num_rows(rig.plan()) == 64
    answer(rig, shortages=2)
    assert num_rows(rig.plan()) == 32
    answer(rig)
    finish(rig)
    for job in jobs:
        assert_right(job, rig.answers[job.request_id])
    assert 33 <= max(num_rows(plan) for plan in rig.plans[2:]) <= 64


def test_an_item_of_more_rows_than_the_budget_has_runs_before_all_others() -> None:
    rig = make_rig(budget=64)
    rig.submit(first := likelihood_job("first", [random_tokens(1, 64)], [[1, 2]]))
    rig.plan()
    answer(rig, shortages=1)
    decoding = generate_job("decoding", random_tokens(2, 5), max_new_tokens=30)
    long = likelihood_job("long", [random_tokens(4, 3)], [random_tokens(5, 44)] * 3)
    rig.submit(decoding, long)
    finish(rig)
    for job in (first, decoding, long):
        assert_right(job, rig.answers[job.request_id])


def test_only_calls_whose_rows_starve_fail_and_their_pages_are_not_cached() -> None:
    rig = make_rig(budget=128)
    contexts = {name: random_tokens(seed, 35) for seed, name in enumerate("abc")}
    jobs = {name: label_job(name, [context], [[1]], [0]) for name, context in contexts.items()}
    rig.submit(*jobs.values())
    plan = rig.plan()
    assert plan is not None
    tokens = unpack_int32(plan.token_ids).tolist()
    first = next(n for n in range(len(tokens)) if tokens[n : n + 35] == contexts["b"])
    answer(rig, shortages=4, starved=list(range(first, first + 35)))
    error = rig.answers["b"].error
    assert isinstance(error, NeverFits) and "no memory for 35 rows" in str(error)
    assert rig.batcher.resident_tokens(np.array(contexts["b"], np.int32), Realm()) == 0
    finish(rig)
    for name in "ac":
        assert_right(jobs[name], rig.answers[name])
    rig.submit(again := label_job("again", [contexts["b"]], [[1]], [0]))
    finish(rig)
    assert_right(again, rig.answers["again"])


def test_a_call_of_the_step_that_reads_starved_pages_fails_too() -> None:
    rig = make_rig(budget=128)
    shared = random_tokens(1, 32)
    owner = likelihood_job("owner", [shared + [1, 2]], [])
    reader = label_job("reader", [shared + [3, 4, 5]], [[1]], [0])
    other = label_job("other", [random_tokens(9, 20)], [[1]], [0])
    rig.submit(owner, reader, other)
    plan = rig.plan()
    assert plan is not None and num_rows(plan) < 34 + 35 + 2 + 22
    answer(rig, shortages=1, starved=[0])
    assert isinstance(rig.answers["owner"].error, NeverFits)
    assert isinstance(rig.answers["reader"].error, NeverFits)
    finish(rig)
    assert_right(other, rig.answers["other"])


def test_the_end_of_a_long_step_is_for_the_last_rows_of_all_work() -> None:
    budget = StepBudget(9216)
    assert budget.of_step(lambda: 9216) == 9216
    assert budget.of_step(lambda: 100) == 9216
    assert budget.of_step(lambda: 9217) == 8192
    assert StepBudget(4096).of_step(lambda: 5000) == 3584
    assert StepBudget(512).of_step(lambda: 513) == 512


def starved_rows(plan: worker_pb2.StepPlan, rng: np.random.Generator) -> list[int]:
    """Now and then those of a segment, or of a few."""
    starts = unpack_int32(plan.segment_indptr).tolist()
    if plan.repeat > 1 or rng.random() > 0.15:
        return []
    chosen = rng.integers(0, len(starts) - 1, int(rng.integers(1, 3))).tolist()
    return sorted({row for n in chosen for row in range(starts[n], starts[n + 1])})


# A step of one row, all of it kept for short calls that could not start.
ONE_ROW = Setting(
    seed=3,
    budget=8,
    pages=6,
    slots=3,
    steps_in_flight=1,
    jobs=4,
    cancels=False,
    faults=False,
    burst=1,
)


@example(setting=ONE_ROW)
@given(setting=SETTINGS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_starves_the_others_are_right_and_no_page_is_lost(setting: Setting) -> None:
    rig = make_rig(
        pages=setting.pages,
        budget=setting.budget,
        slots=setting.slots,
        in_flight=setting.steps_in_flight,
        burst=setting.burst,
    )
    forest, ahead = Forest(setting.seed, setting.pages), setting.jobs
    jobs: list[Job] = []
    turns = 0
    while ahead or rig.in_flight:
        turns += 1
        assert turns < 20_000, "the batcher does not come to an end"
        if ahead and forest.rng.random() < 0.4:
            ahead -= 1
            try:
                rig.submit(job := forest.job(ahead))
            except NeverFits:
                continue
            jobs.append(job)
        while len(rig.in_flight) < rig.steps_in_flight and rig.plan() is not None:
            pass
        if rig.in_flight:
            shortages = int(forest.rng.integers(4)) // 2
            answer(rig, shortages, starved_rows(rig.in_flight[0], forest.rng))
    finish(rig)
    for job in jobs:
        if not isinstance(rig.answers[job.request_id].error, NeverFits):
            assert_right(job, rig.answers[job.request_id])
