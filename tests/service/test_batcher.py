"""Jobs through the batcher and a literal worker, compared with one-by-one evaluation."""

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.toy_jobs import (
    again,
    assert_right,
    generate_job,
    label_job,
    likelihood_job,
    random_tokens,
    run_right,
    usage_of,
)

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.request import Job, Realm


def kinds(plan: worker_pb2.StepPlan) -> set[int]:
    return set(unpack_int32(plan.segment_kind).tolist())


@pytest.mark.parametrize("item_tokens", [1, 3])
def test_the_first_item_token_keeps_its_likelihood_on_a_prefix_hit(item_tokens: int) -> None:
    rig = make_rig()
    job = likelihood_job("ll", [random_tokens(1, 32)], [random_tokens(2, item_tokens)])
    cold, warm = (run_right(rig, again(job, number))[0] for number in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 31)
    assert warm.computed_tokens == 1 + item_tokens - 1  # the context's last row again


def test_each_call_over_one_prefix_reads_as_many_tokens_as_its_item_has() -> None:
    rig = make_rig()
    context = random_tokens(4, 100)
    for number in range(5):
        item = random_tokens(number, number + 1)
        job = likelihood_job(f"call {number}", [context], [item])
        assert run_right(rig, job)[0].cached_tokens == (99 if number else 0)
        result = rig.answers[job.request_id].result
        assert result is not None and len(result.gather_logprobs) == len(item)


def test_scores_stay_right_when_prefixes_push_each_other_out() -> None:
    rig = make_rig(pages=12, budget=48)
    contexts = [random_tokens(seed, 8 * 16) for seed in range(3)]
    first: dict[int, bytes] = {}
    jobs: list[Job] = []
    for turn in range(30):
        jobs = [
            likelihood_job(f"{turn} {number}", [contexts[number % 3]], [random_tokens(9, 5)])
            for number in range(8)
        ]
        for number, answer in enumerate(rig.run(*jobs)):
            assert answer.result is not None
            found = answer.result.gather_logprobs.tobytes()
            assert first.setdefault(number % 3, found) == found
    assert_right(jobs[0], rig.answers[jobs[0].request_id])
    rig.batcher.check_idle()


def test_single_repeated_and_very_uneven_items_are_scored() -> None:
    rig = make_rig(pages=400, budget=64)
    context = random_tokens(5, 20)
    item = random_tokens(6, 4)
    jobs = [
        label_job("one", [context], [item], [0, 1]),
        label_job("same", [context], [item] * 200, [0, 1]),
        likelihood_job("uneven", [context], [[1], random_tokens(7, 4000), [2]]),
        likelihood_job("no context", [[]], [item, random_tokens(8, 150)]),
    ]
    run_right(rig, *jobs)
    result = rig.answers["same"].result
    assert result is not None and len(np.unique(result.gather_logprobs)) <= 2
    rig.batcher.check_idle()


def test_answers_are_in_the_order_of_the_items_after_chunking() -> None:
    rig = make_rig(budget=32)
    items = [random_tokens(length, length) for length in range(50, 0, -1)]
    contexts = [random_tokens(seed, 10) for seed in range(3)]
    of_item = [number % 3 for number in range(50)]
    run_right(rig, label_job("labels", contexts, items, [1, 4], of_item, classify=True))


def test_a_step_may_hold_jobs_of_every_kind() -> None:
    rig = make_rig(budget=64, slots=8)
    context = random_tokens(1, 20)
    jobs: list[Job] = [
        label_job("two", [context], [[1], [2, 3]], [0, 2]),
        label_job("three", [context], [[4]], [1, 2, 3]),
        likelihood_job("ll", [context], [[5, 6]]),
        generate_job("greedy", context),
        generate_job("warm", random_tokens(2, 9), temperature=1.0, samples=2),
    ]
    rig.submit(jobs[3])
    rig.turn()
    rig.submit(*jobs[:3], jobs[4])
    rig.plan()
    assert kinds(rig.plans[-1]) == {1, 2, 3}
    while rig.turn():
        pass
    for job in jobs:
        assert_right(job, rig.answers[job.request_id])


def test_requests_of_one_step_share_what_is_about_to_be_computed() -> None:
    rig = make_rig()
    context = random_tokens(3, 30)
    jobs = [label_job(f"{number}", [context], [[number]], [0]) for number in range(4)]
    usages = run_right(rig, *jobs)
    assert len(rig.plans) == 1
    assert [usage.computed_tokens for usage in usages] == [31, 1, 1, 1]
    assert [usage.cached_tokens for usage in usages] == [0, 30, 30, 30]


def test_others_go_on_computing_a_shared_context_after_a_cancel() -> None:
    rig = make_rig(budget=16)
    jobs = [label_job(name, [random_tokens(3, 50)], [[1]], [0]) for name in "ab"]
    rig.submit(*jobs)
    rig.plan()
    rig.batcher.cancel("a")
    while rig.turn():
        pass
    assert_right(jobs[1], rig.answers["b"])
    assert rig.answers["a"].num_events == 0
    assert usage_of(rig.answers["b"]).computed_tokens == 50 - 16 + 1


def test_a_call_with_more_contexts_than_the_pool_holds_finishes() -> None:
    rig = make_rig(pages=8, budget=64)
    contexts = [random_tokens(seed, 60) for seed in range(20)]
    items = [random_tokens(seed, 3) for seed in range(20)]
    run_right(rig, likelihood_job("many", contexts, items, list(range(20))))
    rig.batcher.check_idle()


def test_decode_rows_come_first_and_higher_priority_before_earlier() -> None:
    rig = make_rig(budget=20)
    rig.submit(generate_job("g", [1, 2, 3], max_new_tokens=20))
    rig.turn()
    low, high = (label_job(f"{p}", [random_tokens(p, 12)], [[1]], [0], priority=p) for p in (0, 1))
    rig.submit(low, high)
    plan = rig.plan()
    assert plan is not None
    tokens = unpack_int32(plan.token_ids).tolist()
    assert tokens[0] < 0  # sampled by a step that is still in flight
    assert tokens[1:14] == [*random_tokens(1, 12), 1]
    assert tokens[14:] == random_tokens(0, 12)[:6]


def test_a_context_that_is_only_to_be_computed_needs_no_step_when_cached() -> None:
    rig = make_rig()
    warm = likelihood_job("warm", [random_tokens(1, 40)], [])
    assert run_right(rig, warm)[0].computed_tokens == 40
    steps = len(rig.plans)
    usage = run_right(rig, again(warm, 1))[0]
    assert len(rig.plans) == steps
    assert (usage.cached_tokens, usage.prompt_tokens) == (40, 40)
    assert rig.batcher.resident_tokens(warm.contexts[0], Realm()) == 40
    assert rig.batcher.resident_tokens(warm.contexts[0], Realm(salt=b"other")) == 0


def test_usage_shares_the_bytes_of_a_step_by_rows() -> None:
    rig = make_rig()
    jobs = [label_job("a", [[1]], [[2, 3]], [0]), label_job("b", [[4]], [[5]], [0])]
    usages = run_right(rig, *jobs)  # 3 and 2 rows of one step that reads 1,000 bytes
    assert [usage.kv_read_bytes for usage in usages] == [600, 400]
    assert [usage.kv_avoided_bytes for usage in usages] == [300, 200]
