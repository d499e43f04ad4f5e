"""Failed steps, rows that are not finite, and lost workers: who fails, and what stays cached."""

from dataclasses import replace

import numpy as np
import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.toy_jobs import (
    assert_right,
    expected_scores,
    generate_job,
    label_job,
    likelihood_job,
    random_tokens,
)
from tests.service.toy_model import state_of

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import pack_float32, unpack_int32
from stemserve.service.errors import EngineFault, NotReady
from stemserve.service.request import Realm


def finish(rig: Rig) -> None:
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_a_failed_step_fails_its_jobs_and_leaves_nothing_of_them_in_the_cache() -> None:
    rig = make_rig()
    context = random_tokens(1, 40)
    rig.submit(label_job("a", [context], [[1]], [0]), generate_job("b", context))
    rig.plan()
    rig.answer("the device is gone")
    for name in "ab":
        error = rig.answers[name].error
        assert isinstance(error, EngineFault) and "the device is gone" in str(error)
    assert rig.batcher.resident_tokens(np.array(context, np.int32), Realm()) == 0
    assert rig.batcher.load().free_pages == 64
    finish(rig)


def test_a_step_in_flight_that_builds_on_a_failed_one_fails_with_it() -> None:
    rig = make_rig(budget=40)
    context = random_tokens(1, 40)
    first = likelihood_job("first", [context], [])
    rider = label_job("rider", [context + random_tokens(2, 7)], [[1]], [0])
    other = label_job("other", [random_tokens(3, 10)], [[1]], [0])
    rig.submit(first)
    rig.plan()
    rig.submit(rider, other)
    rig.plan()
    rig.answer("out of memory")
    rig.answer()
    assert isinstance(rig.answers["first"].error, EngineFault)
    assert isinstance(rig.answers["rider"].error, EngineFault)
    assert_right(other, rig.answers["other"])
    rig.submit(late := replace(rider, request_id="late"))
    finish(rig)
    assert_right(late, rig.answers["late"])


def test_a_page_begun_with_a_copy_of_a_failed_one_fails_with_it() -> None:
    rig = make_rig()
    rig.submit(label_job("source", [random_tokens(1, 12)], [[1]], [0]))
    rig.plan()
    copier = label_job("copier", [random_tokens(1, 10) + [9, 9, 9]], [[1]], [0])
    rig.submit(copier)
    plan = rig.plan()
    assert plan is not None and unpack_int32(plan.copies)[2] == 10
    rig.answer("a loose cable")
    rig.answer()
    assert isinstance(rig.answers["copier"].error, EngineFault)
    rig.submit(late := replace(copier, request_id="late"))
    finish(rig)
    assert_right(late, rig.answers["late"])


def test_a_job_that_waits_for_a_failed_context_computes_it_itself() -> None:
    rig = make_rig(budget=16)
    context = random_tokens(1, 40)
    rig.submit(label_job("a", [context], [[1]], [0]), job := label_job("b", [context], [[2]], [0]))
    rig.plan()
    rig.answer("flip of a bit")
    finish(rig)
    assert isinstance(rig.answers["a"].error, EngineFault)
    assert_right(job, rig.answers["b"])


@pytest.mark.parametrize("kind", ["label", "class"])
def test_only_the_units_that_read_a_row_without_finite_logits_fail(kind: str) -> None:
    rig = make_rig(budget=8)
    context, items = random_tokens(1, 20), [random_tokens(n, 2) for n in range(6)]
    labels = [0, 1] if kind == "label" else []
    job = label_job("s", [context], items, labels, classify=kind == "class")
    rig.worker.bad_states = {state_of(context + items[4])}
    [answer] = rig.run(job, label_job("beside", [context], [[3]], [1]))[:1]
    assert answer.result is not None and answer.result.failed_units.tolist() == [4]
    logprobs, _, _ = expected_scores(job)
    np.testing.assert_array_equal(answer.result.gather_logprobs, logprobs)
    result = rig.answers["beside"].result
    assert result is not None and not len(result.failed_units)
    finish(rig)


def test_a_context_without_finite_logits_fails_its_readers_and_is_not_kept() -> None:
    rig = make_rig()
    good, bad = random_tokens(1, 20), random_tokens(2, 20)
    rig.worker.bad_states = {state_of(bad)}
    job = likelihood_job("s", [good, bad], [[1, 2], [3, 4], [5]], [1, 0, 1])
    [answer] = rig.run(job)
    assert answer.result is not None and answer.result.failed_units.tolist() == [0, 2]
    assert rig.batcher.resident_tokens(np.array(bad, np.int32), Realm()) == 16
    assert rig.batcher.resident_tokens(np.array(good, np.int32), Realm()) == 20
    finish(rig)


def test_a_generation_without_finite_logits_fails_alone() -> None:
    rig = make_rig()
    bad, good = generate_job("bad", random_tokens(1, 20)), generate_job("good", [1, 2])
    rig.worker.bad_states = {state_of(random_tokens(1, 20))}
    rig.run(bad, good)
    error = rig.answers["bad"].error
    assert isinstance(error, EngineFault) and "token 0 of sample 0" in str(error)
    assert_right(good, rig.answers["good"])
    assert rig.batcher.resident_tokens(bad.prompt, Realm()) == 16
    finish(rig)


def test_a_result_that_does_not_answer_the_step_is_a_fault_never_a_number() -> None:
    rig = make_rig(in_flight=1)
    rig.submit(likelihood_job("s", [[1, 2]], [[3, 4, 5]]))
    plan = rig.plan()
    assert plan is not None
    result = rig.worker.run(plan)
    result.gather_logprobs = pack_float32(np.zeros(2, np.float32))
    rig.in_flight.clear()
    rig.take(rig.batcher.apply(result))
    error = rig.answers["s"].error
    assert isinstance(error, EngineFault) and "2 gather_logprobs where 3" in str(error)
    finish(rig)


def test_when_the_worker_is_lost_every_job_fails_and_the_cache_is_empty() -> None:
    rig = make_rig()
    rig.run(cached := label_job("cached", [random_tokens(1, 40)], [[1]], [0]))
    rig.submit(generate_job("running", random_tokens(2, 20), samples=2))
    rig.turn()
    rig.submit(generate_job("queued", [1]))
    rig.take(rig.batcher.fail_all(NotReady("the worker was lost")))
    for name in ("running", "queued"):
        assert isinstance(rig.answers[name].error, NotReady)
    assert rig.batcher.num_in_flight == 0
    assert rig.batcher.load().free_pages == 64
    rig.in_flight.clear()
    rig.submit(job := replace(cached, request_id="after"))
    finish(rig)
    assert_right(job, rig.answers["after"])


def test_cancelled_jobs_keep_their_pages_until_their_steps_are_answered() -> None:
    rig = make_rig()
    rig.submit(generate_job("g", random_tokens(1, 40), samples=2, max_new_tokens=50))
    for _ in range(3):
        rig.turn()
    rig.plan()
    rig.batcher.cancel("g")
    assert rig.batcher.load().used_pages > 0
    assert rig.plan() is None
    finish(rig)
    assert rig.batcher.load().used_pages == 0


def test_results_must_come_in_the_order_of_the_plans() -> None:
    rig = make_rig()
    rig.submit(generate_job("g", [1, 2]))
    rig.plan()
    with pytest.raises(RuntimeError, match="result of step 9, expected 1"):
        rig.batcher.apply(worker_pb2.StepResult(step_id=9))


def test_pages_of_a_cancelled_prefill_stay_for_the_next_call() -> None:
    rig = make_rig(budget=32)
    context = random_tokens(1, 60)
    rig.submit(label_job("a", [context], [[1]], [0]))
    rig.plan()
    rig.batcher.cancel("a")
    finish(rig)
    [answer] = rig.run(label_job("b", [context], [[1]], [0]))
    assert answer.result is not None and answer.result.usage.cached_tokens == 32
    assert len(unpack_int32(rig.plans[-1].token_ids)) == 60 - 32 + 1
