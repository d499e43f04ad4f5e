"""What the log says of steps whose launch kept the device waiting."""

import gc
import logging
from collections.abc import Generator
from dataclasses import dataclass

import pytest
import torch

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.garbage import GarbageClock
from stemserve.worker.steps.slow_launches import WatchedRunner
from stemserve.worker.steps.step import Step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def collector() -> Generator[None]:
    callbacks = list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks


@dataclass(frozen=True)
class Launched:
    step_id: int

    def result(self) -> worker_pb2.StepResult:
        return worker_pb2.StepResult(step_id=self.step_id)


@dataclass(frozen=True)
class Runner:
    """Collects garbage in every step, or fails."""

    uses_gpu: bool = True
    num_classes: int = 3
    fails: bool = False

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        raise AssertionError("no step is divided")

    def launch(self, plan: worker_pb2.StepPlan) -> Launched:
        if self.fails:
            raise RuntimeError("no launch")
        gc.collect()
        return Launched(plan.step_id)


def launch(runner: Runner, slow_s: float) -> None:
    garbage = GarbageClock()
    garbage.watch()
    watched = WatchedRunner(runner, CPU, garbage, slow_s=slow_s)
    assert (watched.uses_gpu, watched.num_classes) == (True, 3)
    assert watched.launch(worker_pb2.StepPlan(step_id=7)).step_id == 7


def test_a_slow_launch_is_told_with_its_garbage(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        launch(Runner(), slow_s=0.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 7: its launch took ")
    assert isinstance(record.args, tuple)
    _, seconds, garbage, *memory = record.args
    assert isinstance(seconds, float)
    assert isinstance(garbage, float)
    assert 0 < garbage <= seconds
    assert memory == [0, 0]


def test_nothing_is_told_of_a_fast_launch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        launch(Runner(), slow_s=1e6)
    assert not caplog.records


def test_an_error_is_the_runners_own() -> None:
    with pytest.raises(RuntimeError, match="no launch"):
        launch(Runner(fails=True), slow_s=0.0)
