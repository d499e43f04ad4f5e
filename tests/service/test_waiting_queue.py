"""The order of work."""

from dataclasses import dataclass

import numpy as np
import pytest

from stemserve.service.batching.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class Waiting:
    order: tuple[int, int]
    cost_tokens: int


@pytest.mark.parametrize("seed", range(5))
def test_higher_priority_first_then_the_one_that_came_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue: WaitingQueue[Waiting] = WaitingQueue()
    jobs = [Waiting((-int(rng.integers(3)), arrival), arrival + 1) for arrival in range(30)]
    for at in rng.permutation(len(jobs)):
        queue.add(jobs[int(at)])
    gone = jobs[::3]
    assert all(queue.remove(job) for job in gone)
    assert not queue.remove(gone[0])
    left = sorted((job for job in jobs if job not in gone), key=lambda job: job.order)
    assert list(queue) == left and len(queue) == len(left)
    assert queue.num_tokens == sum(job.cost_tokens for job in left)
