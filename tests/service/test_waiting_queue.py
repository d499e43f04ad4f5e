"""The order of work."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from stemserve.service.batching.queue.waiting_queue import WaitingQueue

SHORT = 10


@dataclass(frozen=True)
class Waiting:
    arrival: int
    cost_tokens: int = 1
    priority: int = 0
    tenant: str = ""
    due: float = 30.0

    @property
    def urgency(self) -> tuple[float, int]:
        return self.due, self.arrival


def queue_of(*jobs: Waiting, **weights: float) -> WaitingQueue[Waiting]:
    queue: WaitingQueue[Waiting] = WaitingQueue(weights, short_tokens=SHORT)
    for job in jobs:
        queue.add(job)
    return queue


def drained(queue: WaitingQueue[Waiting]) -> list[Waiting]:
    order: list[Waiting] = []
    while len(queue):
        job = next(iter(queue))
        queue.start(job)
        order.append(job)
    return order


def test_what_waits_is_counted_below_at_and_above_priority_0() -> None:
    priorities = (-7, -1, 0, 0, 0, 5)
    jobs = [Waiting(arrival, priority=priority) for arrival, priority in enumerate(priorities)]
    queue = queue_of(*jobs)
    assert queue.requests_by_priority == (2, 3, 1)
    queue.remove(jobs[0])
    assert queue.requests_by_priority == (1, 3, 1)


@pytest.mark.parametrize("seed", range(5))
def test_of_one_tenant_priority_then_deadline_then_arrival_decides(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = [
        Waiting(
            arrival,
            cost_tokens=int(rng.integers(1, 2 * SHORT)),
            priority=int(rng.integers(3)),
            due=float(rng.integers(4)),
        )
        for arrival in range(40)
    ]
    queue = queue_of(*(jobs[int(at)] for at in rng.permutation(len(jobs))))
    gone = jobs[::3]
    assert all(queue.remove(job) for job in gone)
    assert not queue.remove(gone[0])
    left = sorted(
        (job for job in jobs if job not in gone), key=lambda job: (-job.priority, job.urgency)
    )
    assert list(queue) == left and len(queue) == len(left)
    assert queue.num_tokens == sum(job.cost_tokens for job in left)
    assert drained(queue) == left and not queue.num_tokens


@pytest.mark.parametrize("seed", range(5))
def test_tenants_get_tokens_in_proportion_to_their_weights(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = [
        Waiting(arrival, cost_tokens=int(rng.integers(1, 100)), tenant="ab"[arrival % 2])
        for arrival in range(2000)
    ]
    given: Counter[str] = Counter()
    for job in drained(queue_of(*jobs, a=3.0, b=1.0))[:600]:
        given[job.tenant] += job.cost_tokens
    assert given["a"] / given["b"] == pytest.approx(3.0, rel=0.05)


def test_iterating_shows_the_order_in_which_jobs_would_start() -> None:
    jobs = [Waiting(n, cost_tokens=n % 7 + 1, tenant="abc"[n % 3]) for n in range(60)]
    queue = queue_of(*jobs, a=2.0)
    assert list(queue) == drained(queue_of(*jobs, a=2.0))


def test_a_tenant_that_did_not_wait_has_saved_nothing_up() -> None:
    queue = queue_of(*(Waiting(n, cost_tokens=10, tenant="busy") for n in range(100)))
    for _ in range(50):
        queue.start(next(iter(queue)))
    for n in range(100, 150):
        queue.add(Waiting(n, cost_tokens=10, tenant="late"))
    counts = Counter(job.tenant for job in list(queue)[:20])
    assert counts["busy"] == counts["late"] == 10


def test_higher_priority_comes_first_whoever_it_is() -> None:
    low = [Waiting(n, tenant="a") for n in range(5)]
    high = [Waiting(n, tenant="b", priority=1) for n in range(5, 10)]
    assert list(queue_of(*low, *high)) == [*high, *low]


def test_the_short_jobs_of_the_highest_priority_can_be_taken_first() -> None:
    long = Waiting(0, cost_tokens=SHORT + 1, priority=1)
    short = [Waiting(n, cost_tokens=SHORT, priority=1) for n in (1, 2)]
    lower = Waiting(3, cost_tokens=1)
    assert list(queue_of(long, *short, lower).short()) == short
    assert list(queue_of(long, lower).short()) == []
    assert list(queue_of().short()) == []


def test_what_certainly_comes_before_a_job_is_known() -> None:
    jobs = [
        Waiting(0, cost_tokens=5, priority=1),
        Waiting(1, cost_tokens=7, due=10.0),
        Waiting(2, cost_tokens=11, due=20.0),
        Waiting(3, cost_tokens=13, tenant="other"),
        Waiting(4, cost_tokens=17, priority=-1),
    ]
    assert queue_of(*jobs).tokens_before(Waiting(5, due=15.0)) == 5 + 7
