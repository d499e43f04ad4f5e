"""The steps before the first real one run every strategy, and only where it can run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.worker.tiny_model import COSTS, CPU, make_runner, save_tiny_model, step_limits

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.choice.dispatch import KERNELS
from stemserve.worker.runner import ModelRunner
from stemserve.worker.warm_up import warm_up

HEADS = HeadShape(query_heads=4, kv_heads=2, head_dim=8, scale=8**-0.5)
Ran = set[tuple[str, Kernel]]  # phases and kernels
Strategies = dict[tuple[Phase, Kernel], Strategy]


class Listening:
    """A runner whose reports are kept."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.forced: Ran = set()

    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        result = self._runner.step(plan)
        self.forced |= {
            (group.phase, KERNELS[group.kernel])
            for group in result.groups
            if group.reason == "forced"
        }
        return result


@pytest.fixture
def runner(tmp_path: Path) -> Listening:
    save_tiny_model(tmp_path, seed=1)
    return Listening(make_runner(tmp_path).runner)


@pytest.fixture
def every() -> Strategies:
    return dict(strategies(HEADS, device=CPU, dtype=torch.float32, costs=COSTS))


def test_every_strategy_that_takes_the_layout_runs(runner: Listening, every: Strategies) -> None:
    warm_up(runner, step_limits(4), every)
    assert runner.forced == {(str(phase), kernel) for phase, kernel in every}


def test_what_has_no_room_is_left_out(runner: Listening, every: Strategies) -> None:
    warm_up(runner, replace(step_limits(4), kv_pages=2), every)
    assert not runner.forced
    warm_up(runner, replace(step_limits(4), max_step_tokens=5), every)
    assert {phase for phase, _ in runner.forced} == {Phase.DECODE}
