"""Jobs in the order of work: higher priority first, then the one that came first."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    @property
    def order(self) -> tuple[int, int]: ...

    @property
    def cost_tokens(self) -> int: ...


Job = TypeVar("Job", bound=Ordered)


def _order(job: Ordered) -> tuple[int, int]:
    return job.order


class WaitingQueue(Generic[Job]):
    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self.num_tokens = 0  # that had to be computed for the waiting jobs when they came

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        insort(self._jobs, job, key=_order)
        self.num_tokens += job.cost_tokens

    def remove(self, job: Job) -> bool:
        """Whether the job was waiting."""
        at = bisect_left(self._jobs, job.order, key=_order)
        if at == len(self._jobs) or self._jobs[at] is not job:
            return False
        del self._jobs[at]
        self.num_tokens -= job.cost_tokens
        return True
