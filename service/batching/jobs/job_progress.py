"""How far a job has come, whatever it asks for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.steps.step_builder import IssuedStep, Share, StepBuilder
from stemserve.service.batching.steps.step_outputs import StepOutputs
from stemserve.service.errors import DeadlinePassed
from stemserve.service.request import Event, Job, JobFailed, JobTiming

PATIENCE_S = 30.0  # a job without a deadline is ordered as if it had this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A job's place in the order of work."""

    priority: int
    tenant: str
    deadline: float | None

    arrival: int
    submitted_s: float
    cost_tokens: int  # that had to be computed for it when it came
    pages: int  # the most that it needs at a time
    partial: bool = False  # it is answered at its deadline, with what there is

    @property
    def urgency(self) -> tuple[float, int]:
        due = self.submitted_s + PATIENCE_S if self.deadline is None else self.deadline
        return due, self.arrival


class KvByRow(NamedTuple):
    """Bytes of KV that a step's attention read, or did not have to, for each of its rows."""

    decode_read: float
    decode_avoided: float
    prefill_read: float  # items too
    prefill_avoided: float

    @classmethod
    def of(cls, issued: IssuedStep, groups: Sequence[worker_pb2.GroupReport]) -> "KvByRow":
        decode = [group for group in groups if group.phase == "decode"]
        prefill = [group for group in groups if group.phase != "decode"]
        decode_rows = max(1, issued.decode_rows)
        prefill_rows = max(1, issued.num_rows - issued.decode_rows)
        return cls(
            sum(group.kv_read_bytes for group in decode) / decode_rows,
            sum(group.kv_avoided_bytes for group in decode) / decode_rows,
            sum(group.kv_read_bytes for group in prefill) / prefill_rows,
            sum(group.kv_avoided_bytes for group in prefill) / prefill_rows,
        )


class JobProgress(ABC):
    """Plans its rows into steps and takes their results. It holds pages until `release`."""

    decodes = False  # it has, or will have, decode rows

    def __init__(self, job: Job, ticket: Ticket) -> None:
        self.request_id = job.request_id
        self.deadline = job.deadline
        self.priority = job.priority
        self.tenant = job.tenant
        self.arrival = ticket.arrival
        self.order = (-job.priority, ticket.arrival)
        self.urgency = ticket.urgency
        self.submitted_s = ticket.submitted_s
        self.cost_tokens = ticket.cost_tokens
        self.pages = ticket.pages
        self.planned_rows = 0  # of prefill and items, since it started
        self.started_s: float | None = None  # first planned step
        self.in_flight = 0  # issued steps in which it has a share
        self.has_ended = False  # answered, failed or cancelled; rows in flight are dropped
        self._kv_read_bytes = 0.0
        self._kv_avoided_bytes = 0.0

    @property
    @abstractmethod
    def has_started(self) -> bool:
        """It holds what it needs to run, or part of it is done."""

    @property
    @abstractmethod
    def holds_pages(self) -> bool: ...

    @property
    @abstractmethod
    def has_rows_to_plan(self) -> bool:
        """Rows other than decode rows."""

    @property
    def awaits_result(self) -> bool:
        """It has no rows to plan before those in flight are answered."""
        return False

    @abstractmethod
    def plan(self, step: StepBuilder) -> None:
        """Add the prefill and item rows for which the step has room."""

    @abstractmethod
    def deliver(self, outputs: StepOutputs) -> list[Event]:
        """Take what a step read out for it; the last event of the job comes from `finish`."""

    @abstractmethod
    def finish(self, now: float) -> Event | None:
        """The job's last event, if all its results are in."""

    def expire(self, now: float) -> Event:
        """The job's last event when its deadline comes first."""
        error = DeadlinePassed("the deadline passed before the work was done")
        return JobFailed(request_id=self.request_id, error=error)

    @abstractmethod
    def release(self) -> None:
        """Let go of pages and slots; no step in flight may use them."""

    @abstractmethod
    def held_nodes(self) -> list[PageNode]:
        """Pages of the prefix tree that it holds."""

    @abstractmethod
    def recheck(self) -> None:
        """Pages that it holds may have lost what a failed step should have computed."""

    def add_kv(self, share: Share, kv: KvByRow) -> None:
        """Take its share, by rows, of the KV that a step's attention read."""
        self._kv_read_bytes += share.decode_rows * kv.decode_read
        self._kv_avoided_bytes += share.decode_rows * kv.decode_avoided
        if share.prefill_rows:
            self._kv_read_bytes += share.prefill_rows * kv.prefill_read
            self._kv_avoided_bytes += share.prefill_rows * kv.prefill_avoided

    @property
    def kv_read_bytes(self) -> int:
        return round(self._kv_read_bytes)

    @property
    def kv_avoided_bytes(self) -> int:
        return round(self._kv_avoided_bytes)

    def timing(self, now: float) -> JobTiming:
        started_s = now if self.started_s is None else self.started_s
        return JobTiming(queue_s=started_s - self.submitted_s, engine_s=now - started_s)
