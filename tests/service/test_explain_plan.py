"""Explaining a job shows the steps it would take, and changes nothing."""

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.toy_jobs import generate_job, label_job, random_tokens

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.calls.explanation import explained_step
from stemserve.service.errors import NeverFits
from stemserve.service.request import Job


def rows_of(plan: worker_pb2.StepPlan) -> int:
    return len(unpack_int32(plan.token_ids))


@pytest.mark.parametrize("in_cache", [0, 20, 40])
def test_explained_steps_are_those_that_run(in_cache: int) -> None:
    rig = make_rig(budget=24)
    context = random_tokens(1, 40)
    if in_cache:
        rig.run(label_job("before", [context[:in_cache]], [[9]], [0]))
    job = label_job("s", [context], [random_tokens(n, 5) for n in range(6)], [0, 1])
    before = rig.batcher.load()
    explained = list(rig.batcher.explain(job))
    assert rig.batcher.load() == before
    first = len(rig.plans)
    rig.run(job)
    assert [rows_of(plan) for plan, _ in explained] == [rows_of(p) for p in rig.plans[first:]]


def test_cached_tokens_are_told_for_each_node() -> None:
    rig = make_rig(budget=64)
    context = random_tokens(1, 40)
    rig.run(label_job("before", [context[:36]], [[9]], [0]))
    job = label_job("s", [context, context[:16]], [[1], [2]], [0], [0, 1])
    [(plan, cached)] = rig.batcher.explain(job)
    assert unpack_int32(plan.node_tokens).tolist() == [16, 24]
    assert cached.tolist() == [16, 20]


def test_a_generation_is_explained_up_to_its_first_decode_step() -> None:
    rig = make_rig(budget=32)
    explained = list(rig.batcher.explain(generate_job("g", random_tokens(1, 40), samples=3)))
    kinds = [set(unpack_int32(plan.segment_kind).tolist()) for plan, _ in explained]
    decode, prefill = worker_pb2.SEGMENT_KIND_DECODE, worker_pb2.SEGMENT_KIND_PREFILL
    assert kinds == [{prefill}, {prefill}, {decode}]
    assert [cached.sum() for _, cached in explained] == [0, 0, 0]
    one_token = generate_job("g", random_tokens(1, 40), max_new_tokens=1)
    assert len(list(rig.batcher.explain(one_token))) == 2


def test_a_job_that_is_running_can_be_explained_beside_itself() -> None:
    rig = make_rig()
    job = generate_job("g", random_tokens(1, 40), max_new_tokens=20)
    rig.submit(job)
    for _ in range(5):
        rig.turn()
    plan, cached = next(rig.batcher.explain(job))
    assert rows_of(plan) == 1 and cached.tolist() == [40]
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_steps_are_planned_as_they_are_taken_whatever_runs_meanwhile() -> None:
    rig = make_rig(budget=24)
    job = label_job("s", [random_tokens(1, 40)], [random_tokens(n, 5) for n in range(6)], [0, 1])
    expected = [rows_of(plan) for plan, _ in rig.batcher.explain(job)]
    explained = rig.batcher.explain(job)
    rows = [rows_of(next(explained)[0])]
    rig.run(job)
    assert rows + [rows_of(plan) for plan, _ in explained] == expected


def test_what_never_fits_cannot_be_explained() -> None:
    job: Job = generate_job("g", random_tokens(1, 40))
    with pytest.raises(NeverFits):
        make_rig(pages=2).batcher.explain(job)


def test_items_without_context_have_no_forest() -> None:
    [(plan, cached)] = make_rig().batcher.explain(label_job("s", [[]], [[1, 2]], [0]))
    assert unpack_int32(plan.segment_node).tolist() == [-1]
    np.testing.assert_array_equal(cached, [])


def test_host_and_device_seconds_of_a_prediction_are_told() -> None:
    strategy = worker_pb2.StrategyPrediction(
        predicted_seconds=3.0, host_seconds=1.0, device_seconds=3.0
    )
    group = worker_pb2.GroupPrediction(phase="prefill", strategies=[strategy])
    step = explained_step(
        worker_pb2.StepPlan(),
        worker_pb2.PredictResponse(groups=[group]),
        cached=np.empty(0, np.int32),
    )
    told = step.groups[0].strategies[0]
    assert (told.predicted_seconds, told.host_seconds, told.device_seconds) == (3.0, 1.0, 3.0)
