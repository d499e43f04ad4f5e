"""Which steps calls get that wait together, and one that is too large for a step."""

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.toy_jobs import (
    assert_right,
    label_job,
    likelihood_job,
    random_tokens,
    run_right,
)

from stemserve.proto.v1 import worker_pb2


def roots(plan: worker_pb2.StepPlan) -> int:
    return int((np.frombuffer(plan.node_parent, "<i4") < 0).sum())


def rows(plan: worker_pb2.StepPlan) -> int:
    return len(plan.token_ids) // 4


def test_calls_with_different_prefixes_that_wait_together_run_in_one_step() -> None:
    rig = make_rig(pages=256, budget=1024)
    jobs = [
        label_job(
            f"{number}", [random_tokens(number, 40)], [random_tokens(99 + number, 3)] * 2, [1, 2]
        )
        for number in range(16)
    ]
    run_right(rig, *jobs)
    assert len(rig.plans) == 1
    assert (roots(rig.plans[0]), rows(rig.plans[0])) == (16, 16 * (40 + 2 * 3))


def test_what_comes_while_a_step_runs_shares_the_next_two() -> None:
    rig = make_rig(pages=256, budget=1024)
    jobs = [
        label_job(f"{number}", [random_tokens(number, 40)], [[number, 1]], [1, 2])
        for number in range(8)
    ]
    rig.submit(jobs[0])
    rig.plan()
    rig.submit(*jobs[1:3])
    rig.plan()
    rig.submit(*jobs[3:])
    rig.answer()
    rig.plan()
    assert [roots(plan) for plan in rig.plans] == [1, 2, 5]
    while rig.turn():
        pass
    for job in jobs:
        assert_right(job, rig.answers[job.request_id])


@pytest.mark.parametrize("seed", range(5))
def test_a_large_call_is_cut_into_full_steps_that_others_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [random_tokens(int(n), int(rng.integers(1, 6))) for n in rng.integers(1, 999, 60)]
    large = label_job("large", [random_tokens(seed, 50)], items, [3, 4, 5])
    small = label_job("small", [random_tokens(777, 10)], [[1], [2, 3]], [6])
    rig = make_rig(pages=256, budget=64)
    run_right(rig, large, small)
    total = 50 + sum(map(len, items)) + 10 + 3
    assert sum(map(rows, rig.plans)) == total
    assert max(map(rows, rig.plans)) <= 64
    # No item is cut, so a step may end with less room than the next item needs.
    assert len(rig.plans) <= -(-total // (64 - 6 + 1)) + 1
    assert max(map(roots, rig.plans)) == 2


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_context_whose_end_another_job_computes_is_answered(in_flight: int) -> None:
    """Of two calls that warm the same prefix, the later one may come first."""
    rig = make_rig(budget=16, in_flight=in_flight)
    context = random_tokens(3, 48)  # three full steps
    warm = likelihood_job("warm", [context], [])
    rig.submit(warm)
    rig.plan()
    first = likelihood_job("first", [context], [[1, 2]], priority=1)
    rig.submit(first)
    while rig.turn():
        pass
    for job in (warm, first):
        assert_right(job, rig.answers[job.request_id])
    rig.batcher.check_idle()
