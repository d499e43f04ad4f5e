"""Whether a job may wait: refuses at once what is late, too large, or too much."""

from dataclasses import dataclass

from stemserve.service.errors import DeadlinePassed, NeverFits, QueueFull

MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0
# Assumed until the first steps are measured.
FIRST_TOKENS_PER_S = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherLimits:
    max_step_tokens: int = 512  # rows of a step
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20  # that must be computed, after cache hits

    def __post_init__(self) -> None:
        if min(self.max_step_tokens, self.max_queued_requests, self.max_queued_tokens) < 1:
            raise ValueError(f"every limit must be at least 1: {self}")

    @property
    def max_decode_rows(self) -> int:
        """Rows that running generations take of a step while other work waits."""
        return max(1, self.max_step_tokens // 4)

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
    deadline: float | None


class Admission:
    def __init__(self, limits: BatcherLimits, *, num_pages: int, num_slots: int) -> None:
        self._limits = limits
        self._num_pages = num_pages
        self._num_slots = num_slots
        self._tokens_per_s = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn how fast the worker is."""
        if seconds > 0:
            rate = rows / seconds
            known = self._tokens_per_s
            self._tokens_per_s = rate if not known else 0.9 * known + 0.1 * rate

    def check(
        self, demand: Demand, *, queued_requests: int, queued_tokens: int, now: float
    ) -> None:
        """Raises DeadlinePassed, NeverFits or QueueFull."""
        if demand.deadline is not None and demand.deadline <= now:
            raise DeadlinePassed("the deadline passed before the request was queued")
        if demand.pages > self._num_pages:
            raise NeverFits(
                f"the request needs {demand.pages} KV pages at a time, the pool has "
                f"{self._num_pages}: shorten it, ask for fewer samples, or start a worker with more"
            )
        if demand.samples > self._num_slots:
            raise NeverFits(
                f"the request asks for {demand.samples} samples at a time, the worker has "
                f"{self._num_slots} sampler slots"
            )
        if queued_requests >= self._limits.max_queued_requests:
            raise self._full(f"{queued_requests} requests wait", queued_tokens)
        # A job of any size may wait alone, or it could never run.
        if queued_requests and queued_tokens + demand.tokens > self._limits.max_queued_tokens:
            raise self._full(f"{queued_tokens} tokens wait to be computed", queued_tokens)

    def _full(self, found: str, queued_tokens: int) -> QueueFull:
        wait_s = queued_tokens / (self._tokens_per_s or FIRST_TOKENS_PER_S)
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
        return QueueFull(f"the queue is full: {found}; retry later", retry_after_s=retry_s)
