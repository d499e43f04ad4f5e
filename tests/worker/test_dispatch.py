"""The choice of a strategy: cheapest, forced, fallback, only."""

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import CPU
from tests.worker.toy_strategies import (
    LIMITS,
    TokenCosts,
    Toy,
    naive_and_split,
    summary,
    toys,
    two_trees,
)

from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.engine_cost import BlockEngine
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import TORCH, Kernel, Phase
from stemserve.worker.choice.dispatch import KERNEL_CODES, Dispatcher, NoStrategy
from stemserve.worker.choice.reason import Fallback, Reason
from stemserve.worker.steps.step import Step, decode_step

SHAPE = HeadShape(query_heads=4, kv_heads=2, head_dim=8, scale=0.5)


def test_the_cheapest_is_chosen_and_equal_choices_are_one_group() -> None:
    dispatcher = Dispatcher(toys(*naive_and_split()), TokenCosts(), forced=None)
    assert summary(dispatcher.choose(two_trees())) == [(Kernel.SPLIT, Reason.COST_MODEL, 2)]


def test_the_only_strategy_that_takes_a_layout_is_named_so() -> None:
    naive, split = naive_and_split(refuses_more_segments_than=0)
    dispatcher = Dispatcher(toys(naive, split), TokenCosts(), forced=None)
    assert summary(dispatcher.choose(two_trees())) == [(Kernel.NAIVE, Reason.ONLY, 2)]


def test_trees_stay_apart_where_a_strategy_takes_one_at_a_time() -> None:
    naive, split = naive_and_split(refuses_more_segments_than=1)
    dispatcher = Dispatcher(toys(naive, split), TokenCosts(), forced=None)
    choices = dispatcher.choose(two_trees())
    assert summary(choices) == [(Kernel.SPLIT, Reason.COST_MODEL, 1)] * 2
    assert [choice.group.rows for choice in choices] == [slice(0, 2), slice(2, 4)]


def test_no_strategy_at_all_is_an_error_that_names_the_refusals() -> None:
    _, split = naive_and_split(refuses_more_segments_than=0)
    dispatcher = Dispatcher(toys(split), TokenCosts(), forced=None)
    with pytest.raises(NoStrategy, match="split: more than 0 segments"):
        dispatcher.choose(two_trees())


@pytest.mark.parametrize("by_request", [True, False])
def test_a_forced_kernel_runs_though_it_costs_more(by_request: bool) -> None:
    forced = None if by_request else Kernel.NAIVE
    dispatcher = Dispatcher(toys(*naive_and_split()), TokenCosts(), forced=forced)
    step = two_trees(KERNEL_CODES[Kernel.NAIVE] if by_request else 0)
    assert summary(dispatcher.choose(step)) == [(Kernel.NAIVE, Reason.FORCED, 2)]


def test_a_request_overrides_the_kernel_that_the_worker_forces() -> None:
    dispatcher = Dispatcher(toys(*naive_and_split()), TokenCosts(), forced=Kernel.NAIVE)
    step = two_trees(KERNEL_CODES[Kernel.SPLIT])
    assert summary(dispatcher.choose(step)) == [(Kernel.SPLIT, Reason.FORCED, 2)]


def test_a_forced_kernel_that_refuses_falls_back_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    naive, split = naive_and_split(refuses_more_segments_than=0)
    dispatcher = Dispatcher(toys(naive, split), TokenCosts(), forced=Kernel.SPLIT)
    with caplog.at_level(logging.WARNING):
        choices = [dispatcher.choose(two_trees()) for _ in range(3)]
    assert summary(choices[-1]) == [(Kernel.NAIVE, Reason.FALLBACK, 2)]
    assert dispatcher.fallbacks == 6  # trees
    assert {choice.fallback for choice in choices[-1]} == {Fallback.REFUSED}
    assert [record.message for record in caplog.records] == [
        "forced kernel split cannot run (more than 0 segments); the cost model chooses"
    ]


def test_a_forced_kernel_of_the_other_phase_leaves_the_choice_to_the_cost_model() -> None:
    dispatcher = Dispatcher(toys(*naive_and_split()), TokenCosts(), forced=Kernel.CODEC)
    assert summary(dispatcher.choose(two_trees())) == [(Kernel.SPLIT, Reason.COST_MODEL, 2)]
    assert dispatcher.fallbacks == 0


def test_a_forced_kernel_that_is_withheld_falls_back_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    naive, _ = naive_and_split()
    withheld = [(Phase.PREFILL, Kernel.SPLIT)]
    dispatcher = Dispatcher(toys(naive), TokenCosts(), forced=None, withheld=withheld)
    with caplog.at_level(logging.WARNING):
        choices = dispatcher.choose(two_trees(KERNEL_CODES[Kernel.SPLIT]))
    assert summary(choices) == [(Kernel.NAIVE, Reason.FALLBACK, 2)]
    assert dispatcher.fallbacks == 2
    assert {choice.fallback for choice in choices} == {Fallback.WITHHELD}
    assert "split cannot run (its results depend on the batch)" in caplog.text


def test_decode_rows_and_prompts_are_chosen_for_apart() -> None:
    paged = Toy(kernel=Kernel.PAGED, phase=Phase.DECODE, seconds_a_token=1)
    dispatcher = Dispatcher(toys(*naive_and_split(), paged), TokenCosts(), forced=None)
    plan = PlanBuilder()
    node = plan.node(8, [0, 1])
    plan.item(node, [1])
    plan.decode(node, 1)
    found = summary(dispatcher.choose(decode_step(plan.build(), LIMITS)))
    assert sorted(found) == [
        (Kernel.PAGED, Reason.ONLY, 1),
        (Kernel.SPLIT, Reason.COST_MODEL, 1),
    ]


def test_a_choice_remembered_from_a_similar_shape_does_not_run_what_refuses() -> None:
    @dataclass(kw_only=True)
    class Short(Toy):
        def refusal(self, layout: AttentionLayout) -> str | None:
            return "too long" if layout.chain_tokens.max() > 101 else None

    naive, _ = naive_and_split()
    short = Short(kernel=Kernel.SPLIT, phase=Phase.PREFILL, seconds_a_token=1)
    dispatcher = Dispatcher(toys(naive, short), TokenCosts(), forced=None)
    found: list[Kernel] = []
    for tokens in (100, 102, 100):
        plan = PlanBuilder()
        plan.prefill(plan.node(tokens, range(-(-tokens // 4))), [1])
        (choice,) = dispatcher.choose(decode_step(plan.build(), LIMITS))
        found.append(choice.strategy.kernel)
    assert found == [Kernel.SPLIT, Kernel.NAIVE, Kernel.SPLIT]


def test_torch_paths_are_counted_as_fallbacks_where_the_device_could_do_better() -> None:
    dispatcher = Dispatcher(
        toys(*naive_and_split()), TokenCosts(), forced=None, lacking="flashinfer is not installed"
    )
    choices = dispatcher.choose(two_trees())
    assert summary(choices) == [(Kernel.SPLIT, Reason.FALLBACK, 2)]
    assert {choice.fallback for choice in choices} == {Fallback.LACKING}
    assert dispatcher.fallbacks == 2  # trees


def test_a_large_decode_group_is_not_weighed_at_every_page() -> None:
    paged = Toy(kernel=Kernel.PAGED, phase=Phase.DECODE, seconds_a_token=1)
    dispatcher = Dispatcher(toys(paged), TokenCosts(), forced=None)
    lengths = np.random.default_rng(1).integers(200, 300, 100)
    for more in range(20):
        plan = PlanBuilder()
        for number, tokens in enumerate((lengths + more).tolist()):
            first = 100 * number
            plan.decode(plan.node(tokens, range(first, first - (-tokens // 4))), 1)
        dispatcher.choose(decode_step(plan.build(), LIMITS))
    assert paged.asked <= 3


def test_a_shape_is_weighed_once() -> None:
    naive, split = naive_and_split()
    dispatcher = Dispatcher(toys(naive, split), TokenCosts(), forced=None)
    for _ in range(5):
        dispatcher.choose(two_trees())
    assert naive.asked == 3  # two shapes, and both trees together


def test_a_decode_group_is_weighed_anew_when_it_needs_a_page() -> None:
    paged = Toy(kernel=Kernel.PAGED, phase=Phase.DECODE, seconds_a_token=1)
    dispatcher = Dispatcher(toys(paged), TokenCosts(), forced=None)
    for tokens in range(1, 13):
        plan = PlanBuilder()
        pages = -(-tokens // 4)
        plan.decode(plan.node(tokens, range(pages)), 1)
        plan.decode(plan.node(tokens, range(10, 10 + pages)), 1)
        dispatcher.choose(decode_step(plan.build(), LIMITS))
    assert paged.asked == 3


@pytest.fixture(scope="module")
def real() -> Dispatcher:
    """All strategies, and a device on which a call costs as much as a few thousand bytes."""
    rows, tokens = (1, 16, 1024), (1, 64, 4096)
    seconds = tuple(tuple(2e-5 + 1e-8 * t * max(1.0, r / 64) for t in tokens) for r in rows)
    costs = CostTable(
        device="toy",
        dtype="float32",
        query_heads=SHAPE.query_heads,
        kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        threads=1,
        libraries={},
        engines={
            TORCH: BlockEngine(
                launch_seconds=5e-5, tile_rows=32, rows=rows, kv_tokens=tokens, seconds=seconds
            )
        },
        corrections={},
    )
    available = strategies(SHAPE, device=CPU, dtype=torch.float32, costs=costs)
    return Dispatcher(available, costs, forced=None, replayed=())


def decode_forest(prefix_pages: int, sequences: int) -> Step:
    plan = PlanBuilder()
    root = plan.node(4 * prefix_pages, range(prefix_pages)) if prefix_pages else -1
    for i in range(sequences):
        plan.decode(plan.node(3, [prefix_pages + i], root), 1)
    return decode_step(plan.build(), LIMITS)


def test_the_shape_of_the_forest_changes_the_choice(real: Dispatcher) -> None:
    (shared,) = real.choose(decode_forest(prefix_pages=2000, sequences=16))
    (apart,) = real.choose(decode_forest(prefix_pages=0, sequences=16))
    assert shared.strategy.kernel in (Kernel.CASCADE, Kernel.CODEC)
    assert apart.strategy.kernel is Kernel.PAGED


def test_the_prediction_of_the_choice_is_the_least(real: Dispatcher) -> None:
    (choice,) = real.choose(decode_forest(prefix_pages=2000, sequences=16))
    predictions = real.predict(choice.group)
    assert predictions[0].kernel is choice.strategy.kernel
    assert [p.seconds for p in predictions] == sorted(p.seconds for p in predictions)
    by_kernel = {p.kernel: p for p in predictions}
    assert by_kernel[Kernel.PAGED].kv_tokens_read == 16 * 8003
    assert by_kernel[Kernel.CASCADE].kv_tokens_read == 8000 + 16 * 3


def test_the_plan_does_the_work_that_was_priced(real: Dispatcher) -> None:
    (choice,) = real.choose(decode_forest(prefix_pages=20, sequences=3))
    work = choice.strategy.work(choice.group.layout)
    planned = choice.strategy.plan(choice.group.layout).work
    assert planned.launches == work.launches
    assert np.array_equal(planned.kv_tokens, work.kv_tokens)
