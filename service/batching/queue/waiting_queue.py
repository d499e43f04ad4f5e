"""Jobs in the order of work: priority, then tenants by their shares, then the nearest deadline."""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Generic, NamedTuple, Protocol, TypeVar


class Ordered(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def urgency(self) -> tuple[float, int]:
        """Deadline, then arrival."""
        ...

    @property
    def cost_tokens(self) -> int: ...


Job = TypeVar("Job", bound=Ordered)


def _urgency(job: Ordered) -> tuple[float, int]:
    return job.urgency


class Lane(NamedTuple):
    """Jobs of one lane go in the order of their urgency."""

    falling_priority: int
    tenant: str
    is_long: bool


class WaitingQueue(Generic[Job]):
    """Start-time fair queueing (Goyal, Vin and Cheng 1996) over tenants, earliest deadline first
    within a tenant.

    A tenant's virtual time is the tokens that it was given over its weight; the tenant that is
    furthest behind comes next. One that had nothing to do does not save up for later.
    """

    def __init__(self, weights: Mapping[str, float], *, short_tokens: int) -> None:
        """A job of at most `short_tokens` is short."""
        self._weights = weights
        self._short_tokens = short_tokens
        self._lanes: dict[Lane, list[Job]] = {}
        self._virtual: dict[str, float] = {}  # by tenant
        self._now = 0.0  # virtual time at which the last job started
        # Of the waiting jobs, by tenant; tokens that had to be computed for them when they came.
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._by_age: dict[int, Job] = {}  # by arrival number; the oldest first
        self.num_tokens = 0  # of all tenants

    def __len__(self) -> int:
        return len(self._by_age)

    @property
    def oldest(self) -> Job | None:
        """The job that has been in the queue for longest."""
        return next(iter(self._by_age.values()), None)

    @property
    def requests_by_priority(self) -> tuple[int, int, int]:
        """Those below 0, of 0 and above."""
        counts = [0, 0, 0]
        for lane, jobs in self._lanes.items():
            counts[1 + (lane.falling_priority < 0) - (lane.falling_priority > 0)] += len(jobs)
        return counts[0], counts[1], counts[2]

    @property
    def has_short_and_long(self) -> tuple[bool, bool]:
        kinds = {lane.is_long for lane in self._lanes}
        return False in kinds, True in kinds

    def __iter__(self) -> Iterator[Job]:
        return self._in_order(sorted(self._lanes))

    def short(self) -> Iterator[Job]:
        """The short jobs of the highest priority that waits, in order."""
        lanes = sorted(self._lanes)
        return self._in_order(
            [lane for lane in lanes if not lane.is_long and lane[0] == lanes[0][0]]
        )

    def add(self, job: Job) -> None:
        if not self.requests[job.tenant]:
            self._virtual[job.tenant] = max(self._virtual.get(job.tenant, 0.0), self._now)
        insort(self._lanes.setdefault(self._lane(job), []), job, key=_urgency)
        self._by_age[job.urgency[1]] = job
        self.requests[job.tenant] += 1
        self.tokens[job.tenant] += job.cost_tokens
        self.num_tokens += job.cost_tokens

    def remove(self, job: Job) -> bool:
        """Whether the job was waiting."""
        lane = self._lane(job)
        jobs = self._lanes.get(lane, [])
        at = bisect_left(jobs, job.urgency, key=_urgency)
        if at == len(jobs) or jobs[at] is not job:
            return False
        del jobs[at]
        if not jobs:
            del self._lanes[lane]
        del self._by_age[job.urgency[1]]
        self.requests[job.tenant] -= 1
        self.tokens[job.tenant] -= job.cost_tokens
        self.num_tokens -= job.cost_tokens
        return True

    def tokens_before(self, job: Ordered) -> int:
        """What waits for the job's tenant and certainly comes before the job."""
        before = 0
        for lane, jobs in self._lanes.items():
            if lane.tenant == job.tenant and lane.falling_priority <= -job.priority:
                ahead = lane.falling_priority < -job.priority
                before += sum(
                    other.cost_tokens for other in jobs if ahead or other.urgency < job.urgency
                )
        return before

    def start(self, job: Job) -> None:
        """Take a waiting job out and charge its tenant."""
        self.remove(job)
        self._now = max(self._now, self._virtual[job.tenant])
        self.charge(job.tenant, job.cost_tokens)

    def charge(self, tenant: str, tokens: int) -> None:
        """What a tenant is given."""
        virtual = self._virtual.get(tenant, self._now)
        self._virtual[tenant] = virtual + self._charge(tenant, tokens)

    def _in_order(self, lanes: list[Lane]) -> Iterator[Job]:
        if len(lanes) == 1:  # as mostly
            yield from list(self._lanes[lanes[0]])
            return
        for _, same in groupby(lanes, key=lambda lane: lane.falling_priority):
            yield from self._fair(list(same))

    def _fair(self, lanes: list[Lane]) -> Iterator[Job]:
        """What would start, one after another, if each could."""
        tenants = {lane.tenant for lane in lanes}
        turns = [(self._virtual[tenant], tenant) for tenant in tenants]
        heapq.heapify(turns)
        jobs = {
            tenant: heapq.merge(
                *(list(self._lanes[lane]) for lane in lanes if lane.tenant == tenant), key=_urgency
            )
            for tenant in tenants
        }
        while turns:
            virtual, tenant = heapq.heappop(turns)
            job = next(jobs[tenant], None)
            if job is not None:
                yield job
                charge = self._charge(tenant, job.cost_tokens)
                heapq.heappush(turns, (virtual + charge, tenant))

    def _charge(self, tenant: str, tokens: int) -> float:
        return max(1, tokens) / self._weights.get(tenant, 1.0)

    def _lane(self, job: Job) -> Lane:
        return Lane(-job.priority, job.tenant, job.cost_tokens > self._short_tokens)
