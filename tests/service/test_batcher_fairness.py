"""Who gets the rows of a step: short jobs beside long ones, and tenants by their weights."""

import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.toy_jobs import generate_job, likelihood_job, random_tokens, run_right

from stemserve.service.batching.queue.admission import TenantShare
from stemserve.service.errors import DeadlinePassed, QueueFull, QuotaExceeded

BUDGET = 64


def turns_until_tokens(rig: Rig, request_id: str) -> int:
    turns = 0
    while not rig.answers[request_id].tokens:
        assert rig.turn()
        turns += 1
    return turns


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    rig = make_rig(pages=600, budget=BUDGET)
    long = likelihood_job("long", [random_tokens(1, 4000)], [[1]])
    rig.submit(long)
    rig.turn()
    rig.submit(generate_job("short", random_tokens(2, 8), max_new_tokens=3))
    assert turns_until_tokens(rig, "short") <= 1 + rig.steps_in_flight
    assert rig.answers["long"].result is None
    while rig.turn():
        pass
    assert rig.answers["long"].result is not None
    rig.batcher.check_idle()


def test_short_jobs_take_a_part_of_each_step_and_no_more() -> None:
    rig = make_rig(pages=600, budget=BUDGET)
    rig.submit(likelihood_job("long", [random_tokens(1, 1000)], [[1]]))
    for n in range(200):
        rig.submit(likelihood_job(f"short{n}", [[n % 7, n % 5]], [[1, 2, 3]]))
    turns = 0
    while rig.answers["long"].result is None:
        assert rig.turn()
        turns += 1
    assert turns <= 1000 / (BUDGET * 3 / 4) + 2 + rig.steps_in_flight
    done = sum(rig.answers[f"short{n}"].result is not None for n in range(200))
    assert done > 10
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_a_short_job_of_lower_priority_takes_nothing_from_a_long_one() -> None:
    rig = make_rig(pages=600, budget=BUDGET)
    rig.submit(likelihood_job("long", [random_tokens(1, 640)], [[1]], priority=1))
    rig.submit(generate_job("short", [1, 2, 3], max_new_tokens=1))
    for _ in range(8):
        rig.turn()
    assert not rig.answers["short"].tokens
    while rig.turn():
        pass
    assert rig.answers["short"].tokens


def test_tenants_that_wait_are_served_by_their_weights() -> None:
    tenants = {"a": TenantShare(weight=3.0), "b": TenantShare(weight=1.0)}
    rig = make_rig(pages=400, budget=BUDGET, tenants=tenants)
    for n in range(40):
        for tenant in "ab":
            job = likelihood_job(
                f"{tenant}{n}", [random_tokens(n, 40)], [random_tokens(n, 20)], tenant=tenant
            )
            rig.submit(job)

    def done(tenant: str) -> int:
        return sum(rig.answers[f"{tenant}{n}"].result is not None for n in range(40))

    while done("a") + done("b") < 32:
        assert rig.turn()
    assert done("a") == pytest.approx(24, abs=2)
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_the_nearest_deadline_of_a_tenant_goes_first() -> None:
    rig = make_rig(pages=400, budget=BUDGET)
    rig.submit(likelihood_job("patient", [random_tokens(1, 600)], [[1]], deadline=25.0))
    rig.submit(likelihood_job("urgent", [random_tokens(2, 600)], [[1]], deadline=20.0))
    while rig.answers["urgent"].result is None:
        assert rig.turn()
    assert rig.answers["patient"].result is None


def test_a_call_that_cannot_make_its_deadline_is_refused_and_costs_nothing() -> None:
    rig = make_rig(pages=400, budget=BUDGET)
    for seed in range(4):
        run_right(rig, likelihood_job(f"warm{seed}", [random_tokens(seed, 200)], [[1]]))
    rig.submit(likelihood_job("ahead", [random_tokens(9, 5000)], [[1]]))
    job = likelihood_job("late", [random_tokens(8, 300)], [[1]], deadline=rig.now + 1e-4)
    with pytest.raises(DeadlinePassed, match="cannot be met"):
        rig.submit(job)
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_a_tenant_over_its_rate_is_told_when_to_come_back() -> None:
    rig = make_rig(tenants={"a": TenantShare(requests_per_second=1.0)})
    for n in range(2):
        rig.submit(generate_job(f"{n}", [1], tenant="a"))
    with pytest.raises(QuotaExceeded) as refusal:
        rig.submit(generate_job("third", [1], tenant="a"))
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    rig.submit(generate_job("other", [1]))


def test_a_tenant_that_fills_the_queue_fills_it_for_itself() -> None:
    tenants = {"greedy": TenantShare(), "modest": TenantShare()}
    rig = make_rig(tenants=tenants, max_queued_requests=8)
    for n in range(6):
        rig.submit(generate_job(f"greedy{n}", random_tokens(n, 9), tenant="greedy"))
    with pytest.raises(QueueFull):
        rig.submit(generate_job("more", [1], tenant="greedy"))
    rig.submit(generate_job("modest", [1, 2], tenant="modest"))
    while rig.turn():
        pass
    assert rig.answers["modest"].last is not None
    rig.batcher.check_idle()


def test_generated_tokens_count_against_the_tenant_s_rate() -> None:
    rig = make_rig(pages=400, tenants={"a": TenantShare(tokens_per_second=10.0)})
    rig.run(generate_job("long", [1], max_new_tokens=50, tenant="a"))
    with pytest.raises(QuotaExceeded) as refusal:
        rig.submit(generate_job("next", [1], tenant="a"))
    assert refusal.value.retry_after_s == pytest.approx((1 + 1 + 50 - 20) / 10)
    rig.now = refusal.value.retry_after_s
    rig.submit(generate_job("next", [1], tenant="a"))


def test_a_tenant_that_generates_much_falls_behind_one_that_waits() -> None:
    tenants = {"talks": TenantShare(), "asks": TenantShare()}
    rig = make_rig(pages=400, budget=BUDGET, tenants=tenants)
    rig.run(generate_job("tale", [1], max_new_tokens=150, tenant="talks"))
    for tenant in tenants:
        for n in range(4):
            rig.submit(likelihood_job(f"{tenant}{n}", [random_tokens(n, 60)], [[1]], tenant=tenant))
    while rig.answers["asks1"].result is None:
        assert rig.turn()
    assert rig.answers["talks1"].result is None
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_running_generations_take_turns_where_not_all_fit_beside_waiting_work() -> None:
    rig = make_rig(pages=600, budget=16, slots=16)  # 4 decode rows while others wait
    rig.submit(generate_job("wide", [1, 2], samples=8, max_new_tokens=60))
    rig.turn()
    rig.submit(generate_job("late", [3, 4], max_new_tokens=20))
    turns_until_tokens(rig, "late")
    rig.submit(likelihood_job("work", [random_tokens(1, 4000)], [[1]]))
    while rig.answers["late"].last is None:
        assert rig.turn()
    assert rig.answers["wide"].last is None
    while rig.turn():
        pass
    rig.batcher.check_idle()
