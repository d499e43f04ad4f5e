"""Own the batcher, and keep the worker fed with planned steps.

A turn takes all commands that have come, plans as many steps as the worker may have in flight, and
delivers all news to the RPC loop at once. So step k + 1 is planned and sent while step k runs. One
thread at a time has a turn: whoever brings jobs or a result, or else a thread that sleeps on the
inbox up to the next deadline.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
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
from stemserve.service.workers.attached_worker import AttachedWorker
from stemserve.service.workers.step_commands import (
    Ask,
    Attach,
    Cancel,
    Command,
    Inbox,
    Lost,
    Result,
    StepBatcher,
    Stop,
    StopSample,
    Submit,
)
from stemserve.service.workers.watchdog import StepTimeout, Watchdog

_log = logging.getLogger(__name__)


Deliver = Callable[[list[Event]], None]
WorkerLost = Callable[[int, str], None]  # generation, reason

MOST_UNCOUNTED = 64  # results that wait until somebody asks for the metrics
NEVER = float("inf")
LONGEST_SLEEP_S = 3600.0  # a caller's deadline may be longer than a thread can sleep


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
        self._attached: AttachedWorker | None = None
        self._running: dict[str, float] = {}  # request id -> deadline, NEVER without one
        self._events: list[Event] = []
        self._uncounted: list[worker_pb2.StepResult] = []  # applied, not observed yet
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._turns = threading.Lock()  # held by the thread whose turn it is
        self._asleep_until = NEVER
        self._held_until_s = NEVER  # what waits is planned then

    def start(self, *, deliver: Deliver, worker_lost: WorkerLost) -> None:
        """Both callbacks run on whatever thread has its turn."""
        self._deliver = deliver
        self._worker_lost = worker_lost
        self._thread = threading.Thread(target=self._run, name="step-loop")
        self._inbox.let_others(self._work)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._inbox.put(Stop())
        if self._thread is not None:
            self._thread.join()

    def observe_results(self) -> None:
        """Nobody waits for what is counted, but who reads it: to be called before that."""
        with self._turns:
            self._observe_results()

    def _run(self) -> None:
        while not self._stopping:
            self._inbox.wait(self._seconds_to_sleep())
            with self._turns:
                self._turn()

    def _work(self, wait: bool) -> bool:
        """A turn of another thread; False: somebody else has one."""
        if not self._turns.acquire(blocking=wait):
            return False
        try:
            self._turn()
            is_due_early = self._next_moment() < self._asleep_until
        finally:
            self._turns.release()
        if is_due_early:
            self._inbox.call()
        return True

    def _turn(self) -> None:
        while (command := self._inbox.next()) is not None:
            self._guard(partial(self._take, command))
        self._guard(self._go_on)
        in_flight = 0 if self._attached is None else len(self._attached.sent)
        self._inbox.is_busy = in_flight > 0
        self._inbox.is_full = (
            self._attached is not None and in_flight >= self._attached.steps_in_flight
        )
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)
        if len(self._uncounted) >= MOST_UNCOUNTED:
            self._guard(self._observe_results)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # Whatever it is, turns go on: without them every call would hang.
            _log.exception("fault in the step loop")
            self._detach(
                EngineFault(f"fault in the step loop: {error!r}; report it"),
                reason=f"fault in the step loop: {error!r}",
            )

    def _go_on(self) -> None:
        self._check_time()
        self._plan_steps()
        if self._attached is not None:
            self._add(self._attached.batcher.take_events())  # news that no result brought

    def _seconds_to_sleep(self) -> float | None:
        with self._turns:
            self._asleep_until = self._next_moment()
        if self._asleep_until == NEVER:
            return None
        return min(LONGEST_SLEEP_S, max(0.0, self._asleep_until - time.monotonic()))

    def _next_moment(self) -> float:
        """When something is due that nobody may bring."""
        moment = min(self._running.values(), default=NEVER)
        if self._attached is None:
            return moment
        overdue_s = NEVER if self._attached.overdue_s is None else self._attached.overdue_s
        return min(moment, self._held_until_s, overdue_s)

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
                    self._uncounted.append(result)
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
            _log.exception("cannot take job %r", job.request_id)
            fault = EngineFault(f"fault in the step loop: {error!r}; report it")
            self._events.append(JobFailed(request_id=job.request_id, error=fault))
        else:
            self._running[job.request_id] = NEVER if job.deadline is None else job.deadline

    def _cancel(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None and self._attached is not None:
            self._attached.batcher.cancel(request_id)

    def _answer(self, ask: Ask) -> None:
        if not ask.reply.set_running_or_notify_cancel():
            return
        if self._attached is not None:
            self._guard(self._observe_results)
        if self._attached is None:  # or not any more
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
        self._attached = AttachedWorker(
            generation=command.generation,
            worker=command.worker,
            batcher=batcher,
            steps_in_flight=max(1, command.facts.steps_in_flight),
            watchdog=self._watchdog,
        )

    def _plan_steps(self) -> None:
        """A step that the worker would not begin yet is planned when those before it are about to
        end: whoever comes until then is in it, instead of in one more step."""
        attached, self._held_until_s, self._inbox.gathers_until_s = self._attached, NEVER, 0.0
        if attached is None:
            return
        while len(attached.sent) < attached.steps_in_flight:
            if attached.batcher.may_gather:
                until_s = self._inbox.gathers_until_s = attached.plan_by_s
                if time.monotonic() < until_s:
                    self._held_until_s = until_s if attached.batcher.has_work else NEVER
                    return
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

    def _add(self, events: list[Event]) -> None:
        for event in events:
            goes_on = isinstance(event, GenerateChunk) and event.usage is None
            if not (goes_on or isinstance(event, ScorePart)):
                self._running.pop(event.request_id, None)
        self._events += events

    def _observe_results(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        if uncounted and self._attached is not None:
            load = self._attached.batcher.load()
            for result in uncounted:
                self._observe(result, load)
