"""What may wait, and what is refused at once."""

from dataclasses import replace

import numpy as np
import pytest

from stemserve.service.batching.jobs.job_progress import Ticket
from stemserve.service.batching.queue.admission import (
    Admission,
    Backlog,
    BatcherLimits,
    Demand,
    TenantShare,
)
from stemserve.service.batching.queue.token_bucket import BURST_S, TokenBucket
from stemserve.service.batching.steps.step_speed import StepSpeed
from stemserve.service.errors import (
    DeadlinePassed,
    NeverFits,
    QueueFull,
    QuotaExceeded,
    RequestError,
)

SMALL = Demand(pages=2, samples=1, tokens=50)
LIMITS = BatcherLimits(max_queued_requests=3, max_queued_tokens=100, max_step_tokens=80)
NOW = 7.0


def admission(**tenants: TenantShare) -> Admission:
    limits = BatcherLimits(
        max_queued_requests=3, max_queued_tokens=100, max_step_tokens=80, tenants=tenants
    )
    return Admission(limits, num_pages=10, num_slots=4)


def ticket(deadline: float | None = None, tenant: str = "", now: float = NOW) -> Ticket:
    return Ticket(
        priority=0,
        tenant=tenant,
        deadline=deadline,
        arrival=0,
        submitted_s=now,
        cost_tokens=1,
        pages=1,
    )


def backlog(requests: int = 0, tokens: int = 0, before: int = 0) -> Backlog:
    return Backlog(
        pinned_pages=0,
        requests={"": requests},
        tokens={"": tokens},
        tokens_before=before,
        unfinished_tokens=0,
    )


@pytest.mark.parametrize(
    ("demand", "deadline", "before", "refusal"),
    [
        (SMALL, None, backlog(0, 0), None),
        (SMALL, None, backlog(1, 50), None),
        (SMALL, None, backlog(1, 51), QueueFull),
        (SMALL, None, backlog(3, 0), QueueFull),
        (Demand(pages=10, samples=4, tokens=1000), 8.0, backlog(), None),
        (Demand(pages=11, samples=1, tokens=1), None, backlog(), NeverFits),
        (Demand(pages=1, samples=5, tokens=1), None, backlog(), NeverFits),
        (Demand(pages=1, samples=1, tokens=1), NOW, backlog(), DeadlinePassed),
    ],
)
def test_limits_are_kept(
    demand: Demand, deadline: float | None, before: Backlog, refusal: type[RequestError] | None
) -> None:
    gate = admission()
    if refusal is None:
        gate.check(ticket(deadline), demand, before)
        return
    with pytest.raises(refusal):
        gate.check(ticket(deadline), demand, before)


def measured(seconds_a_token: float, **tenants: TenantShare) -> Admission:
    gate = admission(**tenants)
    for rows in (10, 20, 40, 80) * 3:
        gate.observe(rows=rows, seconds=rows * seconds_a_token)
    return gate


def test_the_time_to_retry_follows_the_speed_of_the_worker() -> None:
    with pytest.raises(QueueFull) as refusal:
        measured(0.005).check(ticket(), SMALL, backlog(3, 100))
    assert refusal.value.retry_after_s == pytest.approx(0.5)


def test_a_deadline_that_the_work_before_it_leaves_no_time_for_is_refused_at_once() -> None:
    gate = measured(0.01)
    gate.check(ticket(NOW + 0.6), SMALL, backlog())
    gate.check(ticket(NOW + 2.6), SMALL, backlog(1, 40, before=200))
    with pytest.raises(DeadlinePassed, match="250 tokens .* which take about 2.5 s"):
        gate.check(ticket(NOW + 1.9), SMALL, backlog(1, 40, before=200))


def test_no_more_work_is_accepted_than_may_wait() -> None:
    limits = replace(LIMITS, max_queued_tokens=10_000, max_queued_s=3.0)
    gate = Admission(limits, num_pages=10, num_slots=4)
    for rows in (10, 20, 40, 80) * 3:
        gate.observe(rows=rows, seconds=rows * 0.01)
    gate.check(ticket(), SMALL, replace(backlog(), unfinished_tokens=250))
    with pytest.raises(QueueFull, match="300 tokens are accepted.* about 3.5 s") as refusal:
        gate.check(ticket(), SMALL, replace(backlog(), unfinished_tokens=300))
    assert refusal.value.retry_after_s == pytest.approx(0.5)
    gate.check(ticket(), Demand(pages=1, samples=1, tokens=5000), backlog())


def test_a_short_job_does_not_wait_for_the_long_ones_before_it() -> None:
    short = Demand(pages=1, samples=1, tokens=10)
    measured(0.01).check(ticket(NOW + 0.2), short, backlog(1, 40, before=5000))


def test_nothing_is_refused_for_a_guess() -> None:
    admission().check(ticket(NOW + 1e-6), SMALL, backlog(1, 40, before=1 << 20))


def test_a_tenant_is_held_to_its_requests_and_others_are_not() -> None:
    gate = admission(a=TenantShare(requests_per_second=2.0), b=TenantShare())
    for _ in range(int(2.0 * BURST_S)):
        gate.check(ticket(tenant="a"), SMALL, backlog())
    with pytest.raises(QuotaExceeded, match="requests a second") as refusal:
        gate.check(ticket(tenant="a"), SMALL, backlog())
    assert refusal.value.retry_after_s == pytest.approx(0.5)
    assert refusal.value.subject == "requests_per_second"
    for tenant in ("b", ""):
        gate.check(ticket(tenant=tenant), SMALL, backlog())
    gate.check(ticket(tenant="a", now=NOW + 0.51), SMALL, backlog())


def test_cached_tokens_cost_a_tenant_little_but_something() -> None:
    gate = admission(a=TenantShare(tokens_per_second=100.0))
    cached = Demand(pages=1, samples=1, tokens=0, cached_tokens=1600)
    for _ in range(2):
        gate.check(ticket(tenant="a"), cached, backlog())
    with pytest.raises(QuotaExceeded, match="tokens a second"):
        gate.check(ticket(tenant="a"), cached, backlog())


def test_what_a_tenant_may_not_have_now_is_known_before_its_tokens_are() -> None:
    gate = admission(a=TenantShare(tokens_per_second=100.0), b=TenantShare())
    gate.check_rates("a", 200.0, NOW)  # changes nothing
    gate.check(ticket(tenant="a"), Demand(pages=1, samples=1, tokens=150), backlog())
    gate.check_rates("a", 50.0, NOW)
    with pytest.raises(QuotaExceeded, match="tokens a second") as refusal:
        gate.check_rates("a", 60.0, NOW)
    assert refusal.value.retry_after_s == pytest.approx(0.1)
    gate.check_rates("a", 60.0, NOW + 0.11)
    for tenant in ("b", ""):
        gate.check_rates(tenant, 1e9, NOW)


def test_a_refused_call_costs_its_tenant_nothing() -> None:
    gate = admission(a=TenantShare(requests_per_second=1.0))
    full = replace(backlog(), requests={"a": 3}, tokens={"a": 0})
    for _ in range(10):
        with pytest.raises(QueueFull):
            gate.check(ticket(tenant="a"), SMALL, full)
    gate.check(ticket(tenant="a"), SMALL, backlog())


def test_a_call_larger_than_a_burst_passes_and_is_paid_for_afterwards() -> None:
    bucket = TokenBucket(10.0)
    assert bucket.wait_s(1000.0, 0.0) == 0.0
    bucket.take(1000.0, 0.0)
    assert bucket.wait_s(10.0, 0.0) == pytest.approx((10 + 1000 - 10 * BURST_S) / 10)
    assert bucket.wait_s(10.0, 200.0) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_the_speed_of_steps_is_learnt_from_steps_of_different_sizes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start, each = rng.uniform(0.001, 0.02), rng.uniform(1e-5, 1e-3)
    speed = StepSpeed(max_step_tokens=512)
    assert speed.seconds(100) is None
    for rows in rng.integers(1, 513, 60):
        speed.observe(int(rows), start + float(rows) * each)
    for tokens in (1, 512, 5000):
        expected = -(-tokens // 512) * start + tokens * each
        assert speed.seconds(tokens) == pytest.approx(expected, rel=1e-3)


def test_steps_of_one_size_and_falling_times_give_no_negative_estimate() -> None:
    same, falling = StepSpeed(max_step_tokens=64), StepSpeed(max_step_tokens=64)
    for step in range(10):
        same.observe(64, 0.5)
        falling.observe(1 + step, 1.0 - 0.05 * step)
    assert same.seconds(128) == pytest.approx(1.0)
    estimate = falling.seconds(10)
    assert estimate is not None and 0 < estimate < 1


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 64, 512])
def test_decode_rows_and_the_longest_item_fit_in_one_step(tokens: int) -> None:
    limits = BatcherLimits(max_step_tokens=tokens)
    assert limits.max_decode_rows >= 1 and limits.max_item_rows >= 1
    assert limits.max_decode_rows + limits.max_item_rows <= max(2, tokens)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BatcherLimits(max_step_tokens=0)
