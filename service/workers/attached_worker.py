"""The worker that the step loop feeds, its batcher, and the plans that it has not answered."""

from collections import deque
from dataclasses import dataclass, field

from stemserve.proto.v1 import worker_pb2
from stemserve.service.workers.step_commands import StepBatcher, StepSink
from stemserve.service.workers.watchdog import Watchdog

INT32_BYTES = 4
PLAN_S = 0.002  # that a plan of some calls takes until the worker has it
SURE_PART = 0.8  # of the time that a step is expected to take, it takes almost certainly


@dataclass(slots=True, kw_only=True)
class SentPlan:
    """A plan that the worker has not answered."""

    rows: int
    steps: int  # of a burst
    since_s: float
    expected_s: float | None
    limit_s: float


@dataclass(slots=True, kw_only=True)
class AttachedWorker:
    generation: int
    worker: StepSink
    batcher: StepBatcher
    steps_in_flight: int
    watchdog: Watchdog
    sent: deque[SentPlan] = field(default_factory=deque[SentPlan])  # unanswered plans

    @property
    def overdue_s(self) -> float | None:
        """When the oldest unanswered plan is late; the clock of one starts when the one before it
        has been answered."""
        return self.sent[0].since_s + self.sent[0].limit_s if self.sent else None

    @property
    def plan_by_s(self) -> float:
        """Until when a next plan comes early enough for the worker to go on without a pause; 0:
        nobody knows, or it pauses now."""
        expected_s = 0.0
        for sent in self.sent:
            if sent.expected_s is None:
                return 0.0
            expected_s += sent.expected_s
        return self.sent[0].since_s + SURE_PART * expected_s - PLAN_S if self.sent else 0.0

    def send(self, plan: worker_pb2.StepPlan, now: float) -> None:
        rows, steps = len(plan.token_ids) // INT32_BYTES, max(1, plan.repeat)
        self.sent.append(
            SentPlan(
                rows=rows,
                steps=steps,
                since_s=now,
                expected_s=self.watchdog.expected_s(rows, steps),
                limit_s=self.watchdog.limit_s(rows, steps),
            )
        )
        self.worker.send(plan)

    def answered(self, seconds: float, now: float) -> None:
        sent = self.sent.popleft()
        self.watchdog.observe(sent.rows, seconds / sent.steps)
        if self.sent:
            self.sent[0].since_s = now
