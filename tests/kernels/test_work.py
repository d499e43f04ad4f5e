"""A plan's work is what its run does, as counted where the attention kernel is called."""

import numpy as np
import pytest
import torch
from tests.kernels.forests import (
    Node,
    Segment,
    head_shape,
    items_over,
    make_layout,
    random_inputs,
    random_layout,
)
from tests.kernels.read_counter import ReadCounter, work_blocks

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase, Strategy, Work
from stemserve.kernels.torch_paths.codec_plan import CodecLimits

SHAPE = head_shape(6, 2, 64)
PREFIX = 512
ITEMS = [6] * 20
REQUESTS = 12


def strategy_of(phase: Phase, kernel: Kernel, costs: CostTable) -> Strategy:
    limits = CodecLimits(workers=3, min_split_tokens=32, tile_rows=5)
    cpu = torch.device("cpu")
    return strategies(SHAPE, device=cpu, dtype=torch.float32, costs=costs, limits=limits)[
        phase, kernel
    ]


def count(strategy: Strategy, layout: AttentionLayout) -> tuple[Work, ReadCounter]:
    inputs = random_inputs(layout, SHAPE, seed=0)
    plan = strategy.plan(layout)
    with ReadCounter(SHAPE, inputs.kv.k_pages) as counter:
        strategy.run(plan, inputs.q, inputs.kv)
    return plan.work, counter


KEYS = [
    *((Phase.PREFILL, kernel) for kernel in Kernel if kernel not in (Kernel.PAGED, Kernel.CODEC)),
    *((Phase.DECODE, kernel) for kernel in (Kernel.PAGED, Kernel.CASCADE, Kernel.CODEC)),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("phase", "kernel"), KEYS)
def test_work_is_what_run_reads(phase: Phase, kernel: Kernel, seed: int, costs: CostTable) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, page_size=16, decode=phase is Phase.DECODE)
    strategy = strategy_of(phase, kernel, costs)
    if strategy.refusal(layout) is not None:
        layout = items_over(70, rng.integers(0, 300, size=5).tolist())
    work, counter = count(strategy, layout)
    assert sorted(counter.blocks) == work_blocks(work)
    assert counter.calls <= work.launches <= 2 * counter.calls
    assert work_blocks(strategy.work(layout)) == work_blocks(work)
    assert strategy.work(layout).launches == work.launches


def items_layout() -> AttentionLayout:
    return items_over(PREFIX, ITEMS)


def decode_layout() -> AttentionLayout:
    nodes = [Node(tokens=PREFIX), *[Node(parent=0, tokens=10) for _ in range(REQUESTS)]]
    return make_layout(nodes, [Segment(node=node + 1) for node in range(REQUESTS)])


@pytest.mark.parametrize("kernel", [Kernel.NAIVE, Kernel.SPLIT, Kernel.RAGGED])
def test_these_read_the_prefix_once_an_item(kernel: Kernel, costs: CostTable) -> None:
    _, counter = count(strategy_of(Phase.PREFILL, kernel, costs), items_layout())
    assert sum(tokens for _, tokens in counter.blocks) == len(ITEMS) * PREFIX + sum(ITEMS)


def test_naive_copies_the_prefix_of_every_item(costs: CostTable) -> None:
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.NAIVE, costs), items_layout())
    assert counter.tokens_gathered == len(ITEMS) * PREFIX


@pytest.mark.parametrize("kernel", [Kernel.SPLIT, Kernel.RAGGED, Kernel.CASCADE])
def test_these_read_consecutive_pages_in_place(kernel: Kernel, costs: CostTable) -> None:
    _, counter = count(strategy_of(Phase.PREFILL, kernel, costs), items_layout())
    assert counter.tokens_gathered == 0


def test_cascade_reads_the_prefix_once(costs: CostTable) -> None:
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.CASCADE, costs), items_layout())
    assert sum(tokens for _, tokens in counter.blocks) == PREFIX + sum(ITEMS)


def test_multi_item_reads_the_prefix_once_a_tile(costs: CostTable) -> None:
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.MULTI_ITEM, costs), items_over(600, ITEMS))
    assert counter.calls == 1
    assert counter.blocks == [(sum(ITEMS), 600 + sum(ITEMS))]


def test_multi_item_skips_the_items_before_a_tile(costs: CostTable) -> None:
    layout = items_over(100, [8] * 64)
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.MULTI_ITEM, costs), layout)
    assert max(tokens for _, tokens in counter.blocks) <= 100 + 8 + 128


def test_split_runs_the_context_before_the_items(costs: CostTable) -> None:
    layout = make_layout(
        [Node(tokens=400)], [Segment(rows=3, is_item=True), Segment(rows=400), Segment(rows=2)]
    )
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.SPLIT, costs), layout)
    _, ragged = count(strategy_of(Phase.PREFILL, Kernel.RAGGED, costs), layout)
    assert [rows for rows, _ in counter.blocks][-2:] == [3, 3]
    assert sorted(counter.blocks) == sorted(ragged.blocks)


def test_cascade_reads_a_context_that_is_being_computed_once(costs: CostTable) -> None:
    layout = make_layout(
        [Node(tokens=400)], [Segment(rows=400), *[Segment(rows=3, is_item=True)] * 5]
    )
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.CASCADE, costs), layout)
    assert sum(tokens for _, tokens in counter.blocks) == 400 + 15


def test_paged_reads_the_prefix_once_a_request(costs: CostTable) -> None:
    _, counter = count(strategy_of(Phase.DECODE, Kernel.PAGED, costs), decode_layout())
    assert sum(tokens for _, tokens in counter.blocks) == REQUESTS * (PREFIX + 10)


@pytest.mark.parametrize("kernel", [Kernel.CASCADE, Kernel.CODEC])
def test_tree_decode_reads_every_node_once(kernel: Kernel, costs: CostTable) -> None:
    cpu = torch.device("cpu")
    strategy = strategies(SHAPE, device=cpu, dtype=torch.float32, costs=costs)[Phase.DECODE, kernel]
    _, counter = count(strategy, decode_layout())
    assert sum(tokens for _, tokens in counter.blocks) == PREFIX + REQUESTS * 10


@pytest.mark.parametrize(
    ("kernel", "most_calls"), [(Kernel.RAGGED, 20), (Kernel.CASCADE, 10), (Kernel.MULTI_ITEM, 36)]
)
def test_many_items_take_few_calls(kernel: Kernel, most_calls: int, costs: CostTable) -> None:
    lengths = np.random.default_rng(1).integers(1, 17, size=500).tolist()
    work = strategy_of(Phase.PREFILL, kernel, costs).work(items_over(300, lengths))
    assert work.launches <= most_calls


@pytest.mark.parametrize("kernel", [Kernel.RAGGED, Kernel.CASCADE])
def test_many_short_contexts_take_few_calls(kernel: Kernel, costs: CostTable) -> None:
    tokens = np.random.default_rng(2).integers(60, 250, size=48).tolist()
    nodes = [Node(tokens=n) for n in tokens]
    segments = [Segment(node=node, rows=7, is_item=True) for node in range(48)]
    strategy = strategy_of(Phase.PREFILL, kernel, costs)
    work = strategy.work(make_layout(nodes, segments))
    assert work.launches <= 14
    assert work.kv_tokens_read <= 1.25 * (sum(tokens) + 48 * 7)


def test_scattered_pages_are_gathered_once_for_all_rows(costs: CostTable) -> None:
    layout = make_layout(
        [Node(tokens=512)],
        [Segment(rows=2, is_item=True)] * 9,
        shuffle=np.random.default_rng(3),
    )
    _, counter = count(strategy_of(Phase.PREFILL, Kernel.CASCADE, costs), layout)
    assert counter.tokens_gathered == 512
