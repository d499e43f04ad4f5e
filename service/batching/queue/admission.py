"""Whether a job may wait: refuses at once what is late, too large, or too much."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemserve.service.batching.jobs.job_progress import Ticket
from stemserve.service.batching.queue.token_bucket import TokenBucket
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.batching.steps.step_speed import StepSpeed
from stemserve.service.errors import DeadlinePassed, NeverFits, QueueFull, QuotaExceeded
from stemserve.service.tenant_shares import TenantShares

MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0
# Assumed until the first steps are measured.
FIRST_TOKENS_PER_S = 1000.0
# A call is refused for its deadline only where it would miss it by a clear margin.
CERTAINTY = 0.8
# A cached token costs a tenant this part of a computed one: reading it is not free.
CACHED_CHARGE = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """0 of a rate: no limit."""

    weight: float = 1.0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherLimits:
    max_step_tokens: int = 512  # rows of a step
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20  # that must be computed, after cache hits
    max_queued_s: float = 600.0  # that all accepted work may take
    max_burst_s: float = 0.02  # that decode steps which go to the worker at once may take
    tenants: Mapping[str, TenantShare] = field(default_factory=dict[str, TenantShare])
    drafts: DraftPolicy = field(default_factory=DraftPolicy)

    def __post_init__(self) -> None:
        if min(self.max_step_tokens, self.max_queued_requests, self.max_queued_tokens) < 1:
            raise ValueError(f"every limit must be at least 1: {self}")
        if not self.max_queued_s > 0:
            raise ValueError(f"max_queued_s must be more than 0: {self}")
        if self.max_burst_s < 0:
            raise ValueError(f"max_burst_s must not be negative: {self}")

    @property
    def max_decode_rows(self) -> int:
        """Rows that running generations take of a step while other work waits."""
        return max(1, self.max_step_tokens // 4)

    @property
    def short_tokens(self) -> int:
        """A job of at most so many need not wait behind long ones."""
        return self.max_step_tokens // 8

    @property
    def max_short_rows(self) -> int:
        """Rows of a step that long jobs leave to short ones."""
        return self.max_step_tokens // 4

    @property
    def max_item_rows(self) -> int:
        """A longer item might never find room in a step beside decode rows."""
        return max(1, self.max_step_tokens - self.max_decode_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job asks of the engine."""

    pages: int  # the most that it needs at a time
    samples: int
    tokens: int  # that must be computed
    cached_tokens: int = 0  # that need not


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What a job would find before it."""

    pinned_pages: int
    requests: Mapping[str, int]  # that wait, by tenant
    tokens: Mapping[str, int]  # to be computed for them
    tokens_before: int  # of these and of running jobs, that certainly come before it
    unfinished_tokens: int  # of running jobs and steps in flight


class _Quota:
    def __init__(self, share: TenantShare) -> None:
        self.requests = TokenBucket(share.requests_per_second)
        self.tokens = TokenBucket(share.tokens_per_second)


class Admission:
    def __init__(self, limits: BatcherLimits, *, num_pages: int, num_slots: int) -> None:
        self._limits = limits
        self._num_pages = num_pages
        self._num_slots = num_slots
        self._speed = StepSpeed(max_step_tokens=limits.max_step_tokens)
        weights = {tenant: share.weight for tenant, share in limits.tenants.items()}
        self._requests = TenantShares(limits.max_queued_requests, weights)
        self._tokens = TenantShares(limits.max_queued_tokens, weights)
        self._quotas = {tenant: _Quota(share) for tenant, share in limits.tenants.items()}

    def observe(self, rows: int, seconds: float) -> None:
        """Learn how fast the worker is from a step that computed prompts or items."""
        self._speed.observe(rows, seconds)

    def check(self, ticket: Ticket, demand: Demand, backlog: Backlog) -> None:
        """Raises DeadlinePassed, NeverFits, QuotaExceeded or QueueFull."""
        self._check_size(demand, self._num_pages - backlog.pinned_pages)
        self._check_deadline(ticket, demand, backlog)
        tenant, tokens = ticket.tenant, sum(backlog.tokens.values())
        if not self._requests.fits(backlog.requests, tenant, 1):
            raise self._full(f"{sum(backlog.requests.values())} requests wait", tokens)
        # A tenant's job of any size may wait alone, or it could never run.
        alone = not backlog.requests.get(tenant, 0)
        if not alone and not self._tokens.fits(backlog.tokens, tenant, demand.tokens):
            raise self._full(f"{tokens} tokens wait to be computed", tokens)
        self._check_time(tokens + backlog.unfinished_tokens, demand.tokens)
        self._charge(ticket, demand)

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Tokens that a running job has generated: nobody knew before how many it would be."""
        quota = self._quotas.get(tenant)
        if quota is not None:
            quota.tokens.take(tokens, now)

    def _check_size(self, demand: Demand, pages: int) -> None:
        if demand.pages > pages:
            raise NeverFits(
                f"the request needs {demand.pages} KV pages at a time, the pool has {pages} that "
                "are not pinned: shorten it, ask for fewer samples, or start a worker with more"
            )
        if demand.samples > self._num_slots:
            raise NeverFits(
                f"the request asks for {demand.samples} samples at a time, the worker has "
                f"{self._num_slots} sampler slots"
            )

    def _check_time(self, accepted: int, tokens: int) -> None:
        needed_s = self._speed.seconds(accepted + tokens)
        if not accepted or needed_s is None or needed_s <= self._limits.max_queued_s:
            return
        raise QueueFull(
            f"the queue is full: {accepted} tokens are accepted, with this call they take about "
            f"{needed_s:.3g} s, more than {self._limits.max_queued_s:.3g} s; retry later",
            retry_after_s=_retry_s(needed_s - self._limits.max_queued_s),
        )

    def _check_deadline(self, ticket: Ticket, demand: Demand, backlog: Backlog) -> None:
        if ticket.deadline is None or ticket.partial:
            return
        left_s = ticket.deadline - ticket.submitted_s
        if left_s <= 0:
            raise DeadlinePassed("the deadline passed before the request was queued")
        short = demand.tokens <= self._limits.short_tokens
        work = demand.tokens + (0 if short else backlog.tokens_before)
        needed_s = self._speed.seconds(work)
        if needed_s is not None and CERTAINTY * needed_s > left_s:
            raise DeadlinePassed(
                f"the deadline in {left_s:.3g} s cannot be met: {work} tokens are to be computed "
                f"first, which take about {needed_s:.3g} s"
            )

    def check_rates(self, tenant: str, tokens: float, now: float) -> None:
        """Raises QuotaExceeded where a tenant may not have another call of so many tokens now."""
        quota = self._quotas.get(tenant)
        if quota is None:
            return
        for what, bucket, amount in (
            ("requests", quota.requests, 1.0),
            ("tokens", quota.tokens, tokens),
        ):
            wait_s = bucket.wait_s(amount, now)
            if wait_s > 0:
                raise QuotaExceeded(
                    f"tenant {tenant} is over its {what} a second",
                    subject=f"{what}_per_second",
                    retry_after_s=_retry_s(wait_s),
                )

    def _charge(self, ticket: Ticket, demand: Demand) -> None:
        tenant, now = ticket.tenant, ticket.submitted_s
        tokens = demand.tokens + demand.cached_tokens * CACHED_CHARGE
        self.check_rates(tenant, tokens, now)
        if (quota := self._quotas.get(tenant)) is not None:
            quota.requests.take(1.0, now)
            quota.tokens.take(tokens, now)

    def _full(self, found: str, tokens: int) -> QueueFull:
        wait_s = self._speed.seconds(tokens)
        if wait_s is None:
            wait_s = tokens / FIRST_TOKENS_PER_S
        return QueueFull(f"the queue is full: {found}; retry later", retry_after_s=_retry_s(wait_s))


def _retry_s(wait_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
