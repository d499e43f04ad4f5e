"""What other threads tell the step loop."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from stemserve.proto.v1 import worker_pb2
from stemserve.service.request import Event, Int32, Job, Load, Realm, WorkerFacts


class StepBatcher(Protocol):
    """The batcher as the step loop uses it."""

    def submit(self, job: Job) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stop_sample(self, request_id: str, sample: int) -> None: ...
    def plan_step(self) -> worker_pb2.StepPlan | None: ...
    def apply(self, result: worker_pb2.StepResult) -> list[Event]: ...
    def take_events(self) -> list[Event]: ...
    def explain(self, job: Job) -> Iterator[tuple[worker_pb2.StepPlan, Int32]]: ...
    def check_rates(self, tenant: str, least_tokens: int) -> None: ...
    def load(self) -> Load: ...
    def resident_tokens(self, tokens: Int32, realm: Realm) -> int: ...
    def expire(self) -> list[Event]: ...
    def pin(self, key: str, tokens: Int32, realm: Realm) -> int: ...
    def unpin(self, key: str) -> None: ...
    def clear_cache(self) -> int: ...


class StepSink(Protocol):
    """Takes plans in order; results come back as Result commands of the same generation."""

    def send(self, plan: worker_pb2.StepPlan) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSample:
    request_id: str
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question to the batcher that changes nothing."""

    question: Callable[[StepBatcher], Any]
    reply: Future[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A worker is ready. Generations rise; what an earlier worker still says is dropped."""

    generation: int
    worker: StepSink
    facts: WorkerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    generation: int
    result: worker_pb2.StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the thread. Jobs that still run fail with NotReady."""


Command = Submit | Cancel | StopSample | Ask | Attach | Result | Lost | Stop
Inbox = SimpleQueue[Command]
