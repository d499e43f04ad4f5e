"""Launches steps one at a time, in the order in which their plans came."""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan
from stemserve.worker.choice.probe import Prober
from stemserve.worker.jit_cache import is_full, move_triton_cache
from stemserve.worker.stall_clock import StallClock
from stemserve.worker.steps.smaller_steps import Launched, Runner, launch

log = logging.getLogger(__name__)

IDLE_S = 0.05  # without a plan, before a probe

Outcome = Launched | worker_pb2.StepResult  # the latter for a step that failed


class StepThread:
    """While another thread fetches the result of one step, the next is launched here.

    On a GPU by the thread that brings the plan, which saves waking another: a launch is short. On a
    CPU a launch is the step, and a thread of its own has them, so that plans are still read.
    """

    def __init__(
        self,
        runner: Runner,
        on_device_lost: Callable[[], None],
        *,
        clock: StallClock | None = None,
        move_cache: Callable[[], bool] = move_triton_cache,
        prober: Prober | None = None,
    ) -> None:
        """`clock` times launches. `move_cache` of what is compiled, to another disk; False: there
        is none. `prober` may probe while nothing else is to be done.
        """
        self._runner = runner
        self._clock = StallClock() if clock is None else clock
        self._prober = prober
        self._move_cache = move_cache
        self._on_device_lost = on_device_lost
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # of who launches, on a GPU
        self._thread = threading.Thread(target=self._run, name="steps")

    def __enter__(self) -> Self:
        if not self._runner.uses_gpu:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._runner.uses_gpu:
            self._jobs.put(None)
            self._thread.join()

    def submit(
        self,
        plan: worker_pb2.StepPlan,
        deliver: Callable[[Outcome], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        def job() -> None:
            if is_wanted():
                deliver(self._launch(plan))

        self._add(job)

    def after_all(self, call: Callable[[], None]) -> None:
        """Call once everything that was submitted before has been delivered."""
        self._add(call)

    def _add(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if not self._runner.uses_gpu:
            return
        # Who finds the turn taken leaves the job to its holder, who looks again after giving it up.
        while not self._jobs.empty() and self._turn.acquire(blocking=False):
            try:
                self._work_off()
            finally:
                self._turn.release()

    def _work_off(self) -> None:
        with suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        prober = self._prober
        if prober is not None and prober.is_due:
            try:
                return self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                self._probe(prober)
        return self._jobs.get()

    def _probe(self, prober: Prober) -> None:
        """A fault of a probe harms no step."""
        try:
            prober.probe()
        except Exception:
            log.exception("a probe failed; there are no more")
            self._prober = None
            self._check_device()

    def _launch(self, plan: worker_pb2.StepPlan) -> Outcome:
        with self._clock.running():
            try:
                return self._launch_compiled(plan)
            except Exception as error:
                self._check_device()
                return failed_step(plan.step_id, error)

    def _launch_compiled(self, plan: worker_pb2.StepPlan) -> Launched:
        """Once more, where what it needs could not be compiled for want of room on a disk."""
        try:
            return launch(self._runner, plan)
        except OSError as error:
            if not (is_full(error) and self._move_cache()):
                raise
        return launch(self._runner, plan)

    def _check_device(self) -> None:
        """After some errors every further call to a GPU fails."""
        if not self._runner.uses_gpu:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            log.critical("the device is lost", exc_info=True)
            self._on_device_lost()


def failed_step(step_id: int, error: Exception) -> worker_pb2.StepResult:
    if isinstance(error, BadPlan):
        log.error("step %d: bad plan: %s", step_id, error)
        return worker_pb2.StepResult(step_id=step_id, error=f"bad plan: {error}")
    log.error("step %d failed", step_id, exc_info=error)
    return worker_pb2.StepResult(step_id=step_id, error=f"{type(error).__name__}: {error}")
