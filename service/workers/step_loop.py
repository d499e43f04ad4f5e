"""Own the batcher on a thread of its own, and keep the worker fed with planned steps.

The thread sleeps on its inbox. Each time it wakes it takes everything that has come, plans as many
steps as the worker may have in flight, and delivers all news to the RPC loop at once. So step k + 1
is planned and sent while step k runs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import assert_never

from stemserve.proto.v1 import worker_pb2
from stemserve.service.errors import DeadlinePassed, EngineFault, NotReady, RequestError
from stemserve.service.request import (
    Event,
    GenerateChunk,
    Job,
    JobFailed,
    Load,
    ScorePart,
    WorkerFacts,
)
from stemserve.service.workers.step_commands import (
    Ask,
    Attach,
    Cancel,
    Command,
    Inbox,
    Lost,
    Result,
    StepBatcher,
    StepSink,
    Stop,
    StopSample,
    Submit,
)
from stemserve.service.workers.watchdog import StepTimeout, Watchdog

_log = logging.getLogger(__name__)


INT32_BYTES = 4

Deliver = Callable[[list[Event]], None]
WorkerLost = Callable[[int, str], None]  # generation, reason


@dataclass(slots=True, kw_only=True)
class _Sent:
    """A plan that the worker has not answered."""

    rows: int
    steps: int  # of a burst
    since_s: float
    limit_s: float


@dataclass(slots=True, kw_only=True)
class _Attached:
    generation: int
    worker: StepSink
    batcher: StepBatcher
    steps_in_flight: int
    watchdog: Watchdog
    sent: deque[_Sent] = field(default_factory=deque[_Sent])  # unanswered plans

    @property
    def overdue_s(self) -> float | None:
        """When the oldest unanswered plan is late; the clock of one starts when the one before it
        has been answered."""
        return self.sent[0].since_s + self.sent[0].limit_s if self.sent else None

    def send(self, plan: worker_pb2.StepPlan, now: float) -> None:
        rows, steps = len(plan.token_ids) // INT32_BYTES, max(1, plan.repeat)
        limit_s = self.watchdog.limit_s(rows, steps)
        self.sent.append(_Sent(rows=rows, steps=steps, since_s=now, limit_s=limit_s))
        self.worker.send(plan)

    def answered(self, seconds: float, now: float) -> None:
        sent = self.sent.popleft()
        self.watchdog.observe(sent.rows, seconds / sent.steps)
        if self.sent:
            self.sent[0].since_s = now


class StepLoop:
    """Runs from `start` to `stop`. While no worker is attached, jobs fail with NotReady."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        make_batcher: Callable[[WorkerFacts], StepBatcher],
        observe: Callable[[worker_pb2.StepResult, Load], None],
        step_timeout: StepTimeout,
    ) -> None:
        self._inbox = inbox
        self._make_batcher = make_batcher
        self._observe = observe
        self._watchdog = Watchdog(step_timeout)  # a new worker is as fast as the one before
        self._attached: _Attached | None = None
        self._running: dict[str, float] = {}  # request id -> deadline, inf without one
        self._events: list[Event] = []
        self._applied: list[worker_pb2.StepResult] = []  # not observed yet
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, *, deliver: Deliver, worker_lost: WorkerLost) -> None:
        """Both callbacks run on the step loop's thread."""
        self._deliver = deliver
        self._worker_lost = worker_lost
        self._thread = threading.Thread(target=self._run, name="step-loop")
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._inbox.put(Stop())
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take_commands()
                self._check_time()
                self._plan_steps()
                self._take_events()
                self._flush()
                self._observe_results()
            except Exception as error:
                # Whatever it is, the thread goes on: without it every call would hang.
                _log.exception("fault in the step loop")
                self._detach(
                    EngineFault(f"fault in the step loop: {error!r}; report it"),
                    reason=f"fault in the step loop: {error!r}",
                )
            self._flush()

    def _take_commands(self) -> None:
        """Wait for the first command or the next deadline, then take all that have come."""
        try:
            self._take(self._inbox.get(timeout=self._seconds_to_wait()))
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            return

    def _seconds_to_wait(self) -> float | None:
        moments = [deadline for deadline in self._running.values() if deadline < float("inf")]
        if self._attached is not None and self._attached.overdue_s is not None:
            moments.append(self._attached.overdue_s)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _take(self, command: Command) -> None:
        match command:
            case Submit(job=job):
                self._submit(job)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case StopSample(request_id=request_id, sample=sample):
                if request_id in self._running and self._attached is not None:
                    self._attached.batcher.stop_sample(request_id, sample)
            case Ask():
                self._answer(command)
            case Attach():
                self._attach(command)
            case Result(generation=generation, result=result):
                if self._attached is not None and self._attached.generation == generation:
                    self._attached.answered(result.step_seconds, time.monotonic())
                    self._add(self._attached.batcher.apply(result))
                    self._applied.append(result)
            case Lost(generation=generation, reason=reason):
                if self._attached is not None and self._attached.generation == generation:
                    self._detach(NotReady(f"the worker was lost ({reason}); retry"), reason=reason)
            case Stop():
                self._stopping = True
                self._detach(NotReady("the server stopped; retry on another one"), reason="stop")
            case _:
                assert_never(command)

    def _submit(self, job: Job) -> None:
        if self._attached is None:
            error = NotReady("no worker is ready; retry in a moment")
            self._events.append(JobFailed(request_id=job.request_id, error=error))
            return
        try:
            self._attached.batcher.submit(job)
        except RequestError as error:
            self._events.append(JobFailed(request_id=job.request_id, error=error))
        except Exception as error:  # a job that the batcher did not take harms no other
            _log.exception("cannot take job %s", job.request_id)
            fault = EngineFault(f"fault in the step loop: {error!r}; report it")
            self._events.append(JobFailed(request_id=job.request_id, error=fault))
        else:
            self._running[job.request_id] = float("inf") if job.deadline is None else job.deadline

    def _cancel(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None and self._attached is not None:
            self._attached.batcher.cancel(request_id)

    def _answer(self, ask: Ask) -> None:
        if not ask.reply.set_running_or_notify_cancel():
            return
        if self._attached is None:
            ask.reply.set_exception(NotReady("no worker is ready; retry in a moment"))
            return
        try:
            answer = ask.question(self._attached.batcher)
        except Exception as error:  # it belongs to the one who asked
            ask.reply.set_exception(error)
        else:
            ask.reply.set_result(answer)

    def _attach(self, command: Attach) -> None:
        try:
            batcher = self._make_batcher(command.facts)
        except Exception as error:
            _log.exception("cannot plan for this worker")
            self._worker_lost(command.generation, f"cannot plan for it: {error!r}")
            return
        self._attached = _Attached(
            generation=command.generation,
            worker=command.worker,
            batcher=batcher,
            steps_in_flight=max(1, command.facts.steps_in_flight),
            watchdog=self._watchdog,
        )

    def _plan_steps(self) -> None:
        attached = self._attached
        if attached is None:
            return
        while len(attached.sent) < attached.steps_in_flight:
            plan = attached.batcher.plan_step()
            if plan is None:
                return
            attached.send(plan, time.monotonic())

    def _check_time(self) -> None:
        """End jobs whose deadline has passed, and a worker that does not answer."""
        if self._attached is not None:
            self._add(self._attached.batcher.expire())
        now = time.monotonic()
        for request_id in [job for job, deadline in self._running.items() if deadline <= now]:
            self._cancel(request_id)
            error = DeadlinePassed("the deadline passed before the work was done")
            self._events.append(JobFailed(request_id=request_id, error=error))
        if self._attached is None or self._attached.overdue_s is None:
            return
        if now >= self._attached.overdue_s:
            sent = self._attached.sent[0]
            what = "a step" if sent.steps == 1 else f"a burst of {sent.steps} steps"
            reason = (
                f"{what} of {sent.rows} rows is not answered after {now - sent.since_s:.1f} s, "
                f"the limit is {sent.limit_s:.1f} s"
            )
            self._detach(NotReady(f"the worker hangs ({reason}); retry"), reason=reason)

    def _detach(self, error: RequestError, *, reason: str) -> None:
        """Give the worker and everything that was on it up."""
        attached, self._attached = self._attached, None
        running, self._running = self._running, {}
        self._events += [JobFailed(request_id=job, error=error) for job in running]
        if attached is not None:
            self._worker_lost(attached.generation, reason)

    def _take_events(self) -> None:
        """News that no result brought."""
        if self._attached is not None:
            self._add(self._attached.batcher.take_events())

    def _add(self, events: list[Event]) -> None:
        for event in events:
            goes_on = isinstance(event, GenerateChunk) and event.usage is None
            if not (goes_on or isinstance(event, ScorePart)):
                self._running.pop(event.request_id, None)
        self._events += events

    def _observe_results(self) -> None:
        """Nobody waits for this: it comes when the news is out."""
        applied, self._applied = self._applied, []
        if applied and self._attached is not None:
            load = self._attached.batcher.load()
            for result in applied:
                self._observe(result, load)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)
