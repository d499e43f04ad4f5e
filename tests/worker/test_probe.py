"""Probes of an idle worker: what they say, what they leave alone, and when they run."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import COSTS, VOCAB, TinyRunner, make_runner, save_tiny_model

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.engine_cost import BlockEngine
from stemserve.kernels.strategy import TORCH, Kernel
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.choice.probe import Prober, make_prober
from stemserve.worker.choice.probed_runner import ProbedRunner
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.step_thread import Outcome, StepThread

HEADS = HeadShape(query_heads=4, kv_heads=2, head_dim=8, scale=8**-0.5)
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, seed=5)
    return folder


@pytest.fixture
def plans() -> list[worker_pb2.StepPlan]:
    """A prefix, then items below it, twice."""
    rng = np.random.default_rng(int(time.time()))

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, VOCAB, count).tolist()
        return drawn

    prefix = PlanBuilder()
    prefix.prefill(prefix.node(20, range(5)), tokens(20))
    steps = [prefix]
    for _ in range(2):
        items = PlanBuilder()
        node = items.node(20, range(5))
        for length in (3, 5, 2):
            items.gather(items.item(node, tokens(length)), tokens(4))
        steps.append(items)
    return [step.build(step_id=number) for number, step in enumerate(steps)]


def prober_of(tiny: TinyRunner, rate: float = 1.0, kind: type[Prober] = Prober) -> Prober:
    dispatcher = tiny.runner._dispatcher  # pyright: ignore[reportPrivateUsage]
    return kind(dispatcher, tiny.pool, HEADS, torch.float32, rate=rate)


def pages(tiny: TinyRunner) -> list[torch.Tensor]:
    layers = range(tiny.pool.shape.layers)
    return [p(layer).clone() for layer in layers for p in (tiny.pool.k_pages, tiny.pool.v_pages)]


def test_a_probe_times_the_choice_and_the_next_best_and_changes_nothing(
    folder: Path, plans: list[worker_pb2.StepPlan]
) -> None:
    tiny, other = make_runner(folder), make_runner(folder)
    prober = prober_of(tiny)
    runner = ProbedRunner(tiny.runner, prober)
    for plan in plans[:2]:
        other.runner.step(plan)
        result = runner.launch(plan).result()
        assert not result.probes
    before = pages(tiny)
    assert prober.is_due
    prober.probe()
    assert not prober.is_due
    assert all(torch.equal(a, b) for a, b in zip(before, pages(tiny), strict=True))
    (group,) = tiny.runner.predict(plans[1]).groups
    expected = [s for s in group.strategies if not s.refusal and s.kernel != group.chosen]
    result = runner.launch(plans[2]).result()
    (probe,) = result.probes
    assert (probe.phase, probe.chosen) == ("prefill", group.chosen)
    assert probe.runner_up == expected[0].kernel
    assert probe.chosen_seconds > 0 and probe.runner_up_seconds > 0
    assert result.gather_logprobs == other.runner.step(plans[2]).gather_logprobs
    assert not runner.launch(plans[2]).result().probes  # told of once


def test_where_nobody_chose_there_is_nothing_to_probe(
    folder: Path, plans: list[worker_pb2.StepPlan]
) -> None:
    tiny = make_runner(folder, forced=Kernel.NAIVE)
    prober = prober_of(tiny)
    ProbedRunner(tiny.runner, prober).launch(plans[0])
    assert not prober.is_due


def test_probes_come_at_their_rate_and_are_not_saved_up(
    folder: Path, plans: list[worker_pb2.StepPlan]
) -> None:
    tiny = make_runner(folder)
    prober = prober_of(tiny, rate=0.5)
    runner = ProbedRunner(tiny.runner, prober)
    due: list[bool] = []
    for count in (1, 1, 5, 1, 1):
        for _ in range(count):
            runner.launch(plans[0])
        due.append(prober.is_due)
        if prober.is_due:
            prober.probe()
    assert due == [False, True, True, False, True]


def test_what_would_take_long_is_not_probed(folder: Path, plans: list[worker_pb2.StepPlan]) -> None:
    slow = BlockEngine(
        launch_seconds=1.0,
        tile_rows=32,
        rows=(1, 1024),
        kv_tokens=(1, 1024),
        seconds=((1.0, 1.0), (1.0, 1.0)),
    )
    tiny = make_runner(folder, costs=replace(COSTS, engines={TORCH: slow}))
    prober = prober_of(tiny)
    ProbedRunner(tiny.runner, prober).launch(plans[0])
    prober.probe()
    assert prober.take() == []


class Faulty(Prober):
    def probe(self) -> None:
        raise RuntimeError("no")


def answers(thread: StepThread, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    thread.submit(plan, outcomes.put, lambda: True)
    outcome = outcomes.get(timeout=PATIENCE_S)
    return outcome if isinstance(outcome, worker_pb2.StepResult) else outcome.result()


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_idle_step_thread_probes_once_a_step(
    folder: Path, plans: list[worker_pb2.StepPlan]
) -> None:
    tiny = make_runner(folder)
    prober = prober_of(tiny)
    with StepThread(ProbedRunner(tiny.runner, prober), lambda: None, prober=prober) as thread:
        assert not answers(thread, plans[0]).probes
        wait(lambda: not prober.is_due)
        time.sleep(0.2)  # idle: no second one
        assert len(answers(thread, plans[1]).probes) == 1


def test_steps_that_follow_each_other_are_not_held_up_by_probes(
    folder: Path, plans: list[worker_pb2.StepPlan]
) -> None:
    tiny = make_runner(folder)
    prober = prober_of(tiny)
    outcomes: list[Outcome] = []
    done = threading.Event()
    with StepThread(ProbedRunner(tiny.runner, prober), lambda: None, prober=prober) as thread:

        def hold() -> None:
            done.wait(PATIENCE_S)

        thread.after_all(hold)
        for _ in range(5):
            thread.submit(plans[0], outcomes.append, lambda: True)
        thread.after_all(done.clear)  # the last, so that nothing is idle before it
        done.set()
    results = [o.result() for o in outcomes if not isinstance(o, worker_pb2.StepResult)]
    assert [len(result.probes) for result in results] == [0] * 5


def test_a_fault_of_a_probe_harms_no_step(
    folder: Path, plans: list[worker_pb2.StepPlan], caplog: pytest.LogCaptureFixture
) -> None:
    tiny = make_runner(folder)
    prober = prober_of(tiny, kind=Faulty)
    with StepThread(ProbedRunner(tiny.runner, prober), lambda: None, prober=prober) as thread:
        answers(thread, plans[0])
        wait(lambda: "a probe failed" in caplog.text)
        result = answers(thread, plans[1])
    assert not result.error and not result.probes


def test_on_a_gpu_nobody_probes_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = make_runner(folder)
    dispatcher = tiny.runner._dispatcher  # pyright: ignore[reportPrivateUsage]
    elsewhere = KvPool(tiny.pool.shape, torch.device("meta"))
    assert make_prober(dispatcher, elsewhere, HEADS, torch.float32, rate=0.0) is None
    assert not caplog.records
    assert make_prober(dispatcher, elsewhere, HEADS, torch.float32, rate=0.5) is None
    assert "--kernel-probe-rate 0.5 is ignored" in caplog.text
    assert make_prober(dispatcher, tiny.pool, HEADS, torch.float32, rate=0.5) is not None
