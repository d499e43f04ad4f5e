"""What other threads tell the step loop, and how."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
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
    @property
    def has_work(self) -> bool: ...
    @property
    def may_gather(self) -> bool: ...
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
Work = Callable[[bool], bool]


class Inbox:
    """Commands in the order in which they came, from any thread.

    The step loop's thread works them off when it is called, or whoever brings some does.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._work: Work | None = None
        # The step loop says so: a step is in flight; as many are as may be.
        self.is_busy = self.is_full = False
        # Until then the next step waits for jobs to come; 0: it does not.
        self.gathers_until_s = 0.0

    def put(self, command: Command) -> None:
        self._commands.append(command)
        self.call()

    def leave(self, command: Command) -> None:
        """Without a call: to be followed by `work`."""
        self._commands.append(command)

    def work(self, *, wait: bool) -> None:
        """Do at once, in the caller's thread, what the step loop would: a wake-up less.

        Where another thread is at it, wait for that, or else leave it to the loop's.
        """
        if self._work is None or not self._work(wait):
            self.call()

    def call(self) -> None:
        """Wake the step loop's thread."""
        self._calls.put(None)

    def wait(self, timeout_s: float | None) -> None:
        """For a call; for the step loop's thread."""
        with suppress(Empty):
            self._calls.get(timeout=timeout_s)
            while True:
                self._calls.get_nowait()

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    def next(self) -> Command | None:
        return self._commands.popleft() if self._commands else None

    def let_others(self, work: Work) -> None:
        """Have `work` do what the thread would; it says whether it did, and waits if it must."""
        self._work = work
