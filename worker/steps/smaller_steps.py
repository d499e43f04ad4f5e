"""Runs a step that does not fit in memory as several smaller ones."""

import logging
import time
from typing import Protocol

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.memory.budget import give_back, is_shortage
from stemserve.worker.steps.plan_parts import Part, WholeResult, halves, part_plan
from stemserve.worker.steps.step import Step

log = logging.getLogger(__name__)

# Parts that find no memory though they are as small as can be; then nobody finds any.
MOST_STARVED = 4


class Launched(Protocol):
    @property
    def step_id(self) -> int: ...

    def result(self) -> worker_pb2.StepResult:
        """Waits for the device."""
        ...


class Runner(Protocol):
    @property
    def uses_gpu(self) -> bool: ...

    @property
    def num_classes(self) -> int: ...

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        """Raises BadPlan."""
        ...

    def launch(self, plan: worker_pb2.StepPlan) -> Launched:
        """What it raises leaves everything as if the step had not been launched, but for pages
        that the step writes."""
        ...


class DividedStep:
    """A step that did not fit as a whole: its parts are launched one after the other."""

    def __init__(self, runner: Runner, plan: worker_pb2.StepPlan, step: Step) -> None:
        self._runner = runner
        self._plan = plan
        self._step = step
        self._parts: list[tuple[Part, Launched]] = []
        self._starved: list[Part] = []  # that did not fit, and cannot be divided
        self._shortages = 1
        self._started = time.perf_counter()
        self._divide(Part(start=0, stop=step.num_rows))
        log.warning(
            "step %d: ran in %d parts, after memory ran out %d times; %d rows found none",
            self.step_id,
            len(self._parts),
            self._shortages,
            sum(part.rows for part in self._starved),
        )

    @property
    def step_id(self) -> int:
        return self._step.step_id

    def result(self) -> worker_pb2.StepResult:
        whole = WholeResult(self._step, self._runner.num_classes)
        for part, launched in self._parts:
            whole.add(part, launched.result())
        for part in self._starved:
            whole.starve(part)
        return whole.result(self._shortages, time.perf_counter() - self._started)

    def _divide(self, part: Part) -> None:
        smaller = halves(self._step, part)
        if smaller is None or len(self._starved) >= MOST_STARVED:
            self._starved.append(part)
            return
        for half in smaller:
            launched = self._attempt(half)
            if launched is None:
                self._divide(half)
            else:
                self._parts.append((half, launched))

    def _attempt(self, part: Part) -> Launched | None:
        if len(self._starved) >= MOST_STARVED:
            return None
        launched = _attempt(self._runner, part_plan(self._plan, self._step, part), logging.DEBUG)
        self._shortages += launched is None
        return launched


def launch(runner: Runner, plan: worker_pb2.StepPlan) -> Launched:
    """The step as a whole if there is memory for it, else in parts. Raises as `runner.launch`."""
    whole = _attempt(runner, plan, logging.WARNING)
    return DividedStep(runner, plan, runner.decode(plan)) if whole is None else whole


def _attempt(runner: Runner, plan: worker_pb2.StepPlan, level: int) -> Launched | None:
    """None: there was no memory."""
    try:
        return runner.launch(plan)
    except Exception as error:
        if not is_shortage(error):
            raise
        shortage = str(error).partition("\n")[0]
    # Out here nothing holds the frames of the step, nor what they allocated.
    rows = len(plan.positions) // 4
    log.log(level, "step %d: no memory for %d rows at once: %s", plan.step_id, rows, shortage)
    give_back(uses_gpu=runner.uses_gpu)
    return None
