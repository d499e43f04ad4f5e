"""What may wait, and what is refused at once."""

import pytest

from stemserve.service.batching.admission import Admission, BatcherLimits, Demand
from stemserve.service.errors import DeadlinePassed, NeverFits, QueueFull, RequestError

SMALL = Demand(pages=2, samples=1, tokens=50, deadline=None)
LIMITS = BatcherLimits(max_queued_requests=3, max_queued_tokens=100)


def admission() -> Admission:
    return Admission(LIMITS, num_pages=10, num_slots=4)


@pytest.mark.parametrize(
    ("demand", "requests", "tokens", "refusal"),
    [
        (SMALL, 0, 0, None),
        (SMALL, 1, 50, None),
        (SMALL, 1, 51, QueueFull),
        (SMALL, 3, 0, QueueFull),
        (Demand(pages=10, samples=4, tokens=1000, deadline=8.0), 0, 0, None),
        (Demand(pages=11, samples=1, tokens=1, deadline=None), 0, 0, NeverFits),
        (Demand(pages=1, samples=5, tokens=1, deadline=None), 0, 0, NeverFits),
        (Demand(pages=1, samples=1, tokens=1, deadline=7.0), 0, 0, DeadlinePassed),
    ],
)
def test_limits_are_kept(
    demand: Demand, requests: int, tokens: int, refusal: type[RequestError] | None
) -> None:
    gate = admission()
    if refusal is None:
        gate.check(demand, queued_requests=requests, queued_tokens=tokens, now=7.0)
        return
    with pytest.raises(refusal):
        gate.check(demand, queued_requests=requests, queued_tokens=tokens, now=7.0)


def test_the_time_to_retry_follows_the_speed_of_the_worker() -> None:
    gate = admission()
    gate.observe(rows=400, seconds=2.0)
    with pytest.raises(QueueFull) as refusal:
        gate.check(SMALL, queued_requests=3, queued_tokens=100, now=0.0)
    assert refusal.value.retry_after_s == 0.5


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 64, 512])
def test_decode_rows_and_the_longest_item_fit_in_one_step(tokens: int) -> None:
    limits = BatcherLimits(max_step_tokens=tokens)
    assert limits.max_decode_rows >= 1 and limits.max_item_rows >= 1
    assert limits.max_decode_rows + limits.max_item_rows <= max(2, tokens)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BatcherLimits(max_step_tokens=0)
