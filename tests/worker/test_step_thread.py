"""Steps are launched one at a time in the order of their plans, whoever brings them."""

import queue
import threading
import time
from dataclasses import dataclass, field

import pytest

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.step_thread import Outcome, StepThread
from stemserve.worker.steps.step import Step


@dataclass(frozen=True)
class Launched:
    step_id: int

    def result(self) -> worker_pb2.StepResult:
        return worker_pb2.StepResult(step_id=self.step_id)


@dataclass
class Runner:
    """Takes a moment for each step and notes who launches it."""

    uses_gpu: bool
    threads: list[str] = field(default_factory=list[str])
    running: int = 0
    most_running: int = 0
    num_classes: int = 0

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        raise AssertionError("no step is divided")

    def launch(self, plan: worker_pb2.StepPlan) -> Launched:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        time.sleep(0.001)
        self.threads.append(threading.current_thread().name)
        self.running -= 1
        return Launched(plan.step_id)


def ids(outcomes: "queue.SimpleQueue[Outcome | None]") -> list[int]:
    found: list[int] = []
    while (outcome := outcomes.get(timeout=30)) is not None:
        found.append(outcome.step_id)
    return found


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_outcomes_come_in_order_and_what_waits_for_all_comes_last(uses_gpu: bool) -> None:
    runner, outcomes = Runner(uses_gpu), queue.SimpleQueue[Outcome | None]()
    with StepThread(runner, lambda: None) as steps:
        for step_id in range(20):
            steps.submit(worker_pb2.StepPlan(step_id=step_id), outcomes.put, lambda: True)
        steps.after_all(lambda: outcomes.put(None))
        assert ids(outcomes) == list(range(20))


@pytest.mark.parametrize(("uses_gpu", "thread"), [(True, "MainThread"), (False, "steps")])
def test_on_a_gpu_the_thread_that_brings_a_plan_launches_it(uses_gpu: bool, thread: str) -> None:
    runner, outcomes = Runner(uses_gpu), queue.SimpleQueue[Outcome | None]()
    with StepThread(runner, lambda: None) as steps:
        steps.submit(worker_pb2.StepPlan(), outcomes.put, lambda: True)
        outcomes.get(timeout=30)
    assert runner.threads == [thread]


def test_threads_that_bring_plans_at_once_launch_all_of_them_one_at_a_time() -> None:
    runner, outcomes = Runner(uses_gpu=True), queue.SimpleQueue[Outcome | None]()
    with StepThread(runner, lambda: None) as steps:

        def bring(first: int) -> None:
            for step_id in range(first, first + 25):
                steps.submit(worker_pb2.StepPlan(step_id=step_id), outcomes.put, lambda: True)

        threads = [threading.Thread(target=bring, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        steps.after_all(lambda: outcomes.put(None))
        found = ids(outcomes)
    assert runner.most_running == 1
    for n in range(4):  # each thread's in its order
        own = [step_id for step_id in found if step_id // 100 == n]
        assert own == list(range(100 * n, 100 * n + 25))


def test_an_outcome_that_nobody_wants_is_not_computed() -> None:
    runner, outcomes = Runner(uses_gpu=True), queue.SimpleQueue[Outcome | None]()
    with StepThread(runner, lambda: None) as steps:
        steps.submit(worker_pb2.StepPlan(), outcomes.put, lambda: False)
        steps.after_all(lambda: outcomes.put(None))
    assert ids(outcomes) == [] and not runner.threads
