"""What happens in one call that is traced, as plain data: spans are made of it when it has ended.

The RPC loop writes what it knows, whichever thread does the step loop's work the steps; a call that
has ended takes no more.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from stemserve.service.tracing.trace_context import SpanIds

Value = str | int | float | bool | tuple[str, ...]


class GroupRun(NamedTuple):
    """An attention group of a step, as the worker reports it: all layers, all its rows."""

    phase: str
    kernel: str
    reason: str
    rows: int
    segments: int
    kv_read_bytes: int
    kv_avoided_bytes: int
    predicted_seconds: float
    actual_seconds: float  # 0: it was not timed


@dataclass(slots=True, kw_only=True)
class TracedStep:
    """An engine step, shared by all calls with rows in it. Times are of the monotonic clock."""

    step_id: int
    plan_began_s: float
    plan_ended_s: float
    rows: int
    repeat: int  # steps of a burst
    answered_s: float | None = None  # None: no result has come
    worker_seconds: float = 0.0
    device_seconds: float = 0.0
    trees: int = 0
    failed: bool = False
    groups: tuple[GroupRun, ...] = ()


class StepShare(NamedTuple):
    step: TracedStep
    prefill_rows: int  # of this call; items too
    decode_rows: int


@dataclass(slots=True, kw_only=True, eq=False)
class CallTrace:
    """`max_steps`: as many steps are kept, all are counted."""

    method: str  # full name, without the first slash
    ids: SpanIds
    is_remote_parent: bool
    began_s: float  # monotonic
    epoch_s: float  # to be added to a monotonic time for the time of day
    max_steps: int
    link: SpanIds | None = None  # of the stream that the call came on
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    submitted_s: float | None = None  # to the engine
    shares: list[StepShare] = field(default_factory=list[StepShare])
    num_steps: int = 0
    worker_seconds: float = 0.0  # of all steps
    first_token_s: float | None = None
    ended_s: float | None = None
    code: str = ""  # gRPC status
    problem: str = ""  # class of the error

    def submit(self, now: float) -> None:
        self.submitted_s = now

    def take_step(self, share: StepShare) -> None:
        """Called when the step is planned."""
        if self.ended_s is None:
            self.num_steps += share.step.repeat
            if len(self.shares) < self.max_steps:
                self.shares.append(share)

    def take_result(self, step: TracedStep) -> None:
        self.worker_seconds += step.worker_seconds

    def end(self, now: float, code: str, problem: str) -> None:
        self.code = code
        self.problem = problem
        self.ended_s = now
