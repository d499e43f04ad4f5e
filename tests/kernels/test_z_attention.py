"""Masks and offsets by hand: Q is 0, so an answer is the mean of j squared over what a row sees."""

import numpy as np
import pytest
import torch
from tests.kernels.forests import (
    Node,
    Segment,
    floats,
    head_shape,
    items_over,
    make_layout,
    z_inputs,
)

from stemserve.kernels import reference
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.codec_plan import CodecLimits

CPU = torch.device("cpu")
SHAPE = head_shape(6, 2, 64)
ONE_PREFIX = (
    Kernel.NAIVE,
    Kernel.SPLIT,
    Kernel.RAGGED,
    Kernel.CASCADE,
    Kernel.MULTI_ITEM,
    Kernel.CUSTOM_MASK,
)
DECODE = (Kernel.PAGED, Kernel.CASCADE, Kernel.CODEC)


def answers(
    phase: Phase, kernel: Kernel, layout: AttentionLayout, costs: CostTable
) -> tuple[list[float], list[float]]:
    """The mean that each row answers with, the same in every head and channel; and the LSE."""
    limits = CodecLimits(workers=4, min_split_tokens=16)
    strategy = strategies(SHAPE, device=CPU, dtype=torch.float32, costs=costs, limits=limits)[
        phase, kernel
    ]
    assert strategy.refusal(layout) is None
    inputs = z_inputs(layout, SHAPE)
    out, lse = strategy.run(strategy.plan(layout), inputs.q, inputs.kv)
    torch.testing.assert_close(out, out[:, :1, :1].expand_as(out), atol=0, rtol=1e-5)
    return floats(out[:, 0, 0]), floats(lse[:, 0])


@pytest.mark.parametrize("kernel", ONE_PREFIX)
@pytest.mark.parametrize("cached", [32, 0, 39])
def test_b09_items_after_a_partly_cached_prefix(
    kernel: Kernel, cached: int, costs: CostTable
) -> None:
    segments = [Segment(rows=40 - cached)]
    segments += [Segment(rows=rows, is_item=True) for rows in (3, 1, 5)]
    layout = make_layout([Node(tokens=40)], segments)
    means, _ = answers(Phase.PREFILL, kernel, layout, costs)
    assert means[40 - cached + 3] == pytest.approx(546.0732, abs=1e-3)
    context = [np.square(np.arange(j + 1)).mean() for j in range(cached, 40)]
    assert means[: 40 - cached] == pytest.approx(context, rel=1e-5)
    own = [range(40, 43), range(43, 44), range(44, 49)]
    items = [(20540 + np.cumsum(np.square(j))) / (40 + np.arange(1, len(j) + 1)) for j in own]
    assert means[40 - cached :] == pytest.approx(np.concatenate(items), rel=1e-5)


@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b10_items_do_not_see_one_another(kernel: Kernel, costs: CostTable) -> None:
    means, _ = answers(Phase.PREFILL, kernel, items_over(3, [2, 1, 3]), costs)
    assert means == pytest.approx([3.5, 6.0, 7.5, 10.25, 18.0, 25.6667], abs=1e-4)


@pytest.mark.parametrize("seen", [(1, 1), (2, 1), (2, 3)])
def test_b12_every_kernel_masks_items_or_refuses_them(
    seen: tuple[int, int], costs: CostTable
) -> None:
    """Trees of one and of several contexts; the packed mask takes one context a tree."""
    nodes, contexts = seen
    trees = [Node(parent=n - 1 if n % nodes else -1, tokens=3) for n in range(nodes * contexts)]
    segments = [
        Segment(node=n, rows=rows, is_item=True) for n in range(len(trees)) for rows in (2, 1, 3)
    ]
    layout = make_layout(trees, segments, page_size=1)
    inputs = z_inputs(layout, SHAPE)
    oracle = reference.attention(layout, inputs.q, inputs.kv, SHAPE)
    known = strategies(SHAPE, device=CPU, dtype=torch.float32, costs=costs)
    ran = [key for key, strategy in known.items() if strategy.refusal(layout) is None]
    for phase, kernel in ran:
        means, _ = answers(phase, kernel, layout, costs)
        assert means == pytest.approx(floats(oracle.out[:, 0, 0]), rel=1e-5)
    refused = {key for key in known if key not in ran}
    assert {(Phase.DECODE, kernel) for kernel in DECODE} <= refused
    assert ((Phase.PREFILL, Kernel.MULTI_ITEM) in refused) == (nodes > 1)


@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b14_an_empty_item_moves_no_other(kernel: Kernel, costs: CostTable) -> None:
    means, _ = answers(Phase.PREFILL, kernel, items_over(3, [2, 0, 3]), costs)
    assert means == pytest.approx([3.5, 6.0, 7.5, 13.2, 19.1667], abs=1e-4)


@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b14_items_of_very_uneven_lengths(kernel: Kernel, costs: CostTable) -> None:
    means, _ = answers(Phase.PREFILL, kernel, items_over(3, [1, 4000, 1]), costs)
    sums = 5 + np.cumsum(np.square(np.arange(4, 4004, dtype=np.float64)))
    expected = [3.5, *(sums / np.arange(4, 4004)), (5 + 4004**2) / 4]
    assert means == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b14_two_hundred_equal_items_over_no_context(kernel: Kernel, costs: CostTable) -> None:
    segments = [Segment(node=-1, is_item=True)] * 200
    means, lses = answers(Phase.PREFILL, kernel, make_layout([], segments), costs)
    assert means == pytest.approx([j**2 for j in range(200)])
    assert lses == pytest.approx([0.0] * 200, abs=1e-6)


@pytest.mark.parametrize("kernel", ONE_PREFIX)
@pytest.mark.parametrize("lengths", [(3, 3), (3, 4)])
@pytest.mark.parametrize("is_item", [False, True])
def test_b18_rows_are_causal_whether_lengths_are_equal_or_not(
    kernel: Kernel, lengths: tuple[int, int], is_item: bool, costs: CostTable
) -> None:
    nodes = [] if is_item else [Node(tokens=tokens) for tokens in lengths]
    segments = [
        Segment(node=-1 if is_item else node, rows=rows, is_item=is_item)
        for node, rows in enumerate(lengths)
    ]
    means, _ = answers(Phase.PREFILL, kernel, make_layout(nodes, segments), costs)
    assert means[:3] == pytest.approx([0, 0.5, 1.6667], abs=1e-4)
    second = np.cumsum(np.square(np.arange(3, 3 + lengths[1]))) / np.arange(1, lengths[1] + 1)
    assert means[3:] == pytest.approx(second.tolist(), rel=1e-5)


@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b22_rows_before_the_only_token_answer_0(kernel: Kernel, costs: CostTable) -> None:
    layout = make_layout([Node(tokens=1)], [Segment(rows=3)])
    inputs = z_inputs(layout, SHAPE)
    inputs.kv.v_pages.masked_fill_(~inputs.kv.v_pages.isnan(), 7.0)
    strategy = strategies(SHAPE, device=CPU, dtype=torch.float32, costs=costs)[
        Phase.PREFILL, kernel
    ]
    out, lse = strategy.run(strategy.plan(layout), inputs.q, inputs.kv)
    expected = torch.tensor([0.0, 0.0, 7.0])[:, None, None].expand_as(out)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
    assert floats(lse[:, 0]) == [-np.inf, -np.inf, 0.0]


@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b22_rows_before_the_first_token_see_nothing(kernel: Kernel, costs: CostTable) -> None:
    layout = make_layout([Node(tokens=2)], [Segment(rows=4)])
    means, lses = answers(Phase.PREFILL, kernel, layout, costs)
    assert means == pytest.approx([0, 0, 0, 0.5])
    assert lses == pytest.approx([-np.inf, -np.inf, 0, np.log(2)], abs=1e-6)


@pytest.mark.parametrize("kernel", DECODE)
@pytest.mark.parametrize("empty", [-1, 1])
def test_b22_a_request_without_tokens_moves_no_other(
    kernel: Kernel, empty: int, costs: CostTable
) -> None:
    nodes = [Node(tokens=3), Node(tokens=0), Node(tokens=2)]
    layout = make_layout(nodes, [Segment(node=0), Segment(node=empty), Segment(node=2)])
    means, lses = answers(Phase.DECODE, kernel, layout, costs)
    assert means == pytest.approx([1.6667, 0, 12.5], abs=1e-4)
    assert lses == pytest.approx([np.log(3), -np.inf, np.log(2)], abs=1e-6)


BRANCHING = (-1, 0, 1, 1, 2, 3)
BRANCHING_MEANS = [0, 0.5, 1.6667, 3.3333, 5.25, 8.75]


def token_tree(parents: tuple[int, ...]) -> AttentionLayout:
    """A node and a one-row segment for every token of a tree."""
    nodes = [Node(parent=parent, tokens=1) for parent in parents]
    return make_layout(nodes, [Segment(node=node) for node in range(len(nodes))], page_size=1)


@pytest.mark.parametrize("kernel", DECODE)
def test_b26_siblings_of_a_decode_tree_do_not_see_one_another(
    kernel: Kernel, costs: CostTable
) -> None:
    means, _ = answers(Phase.DECODE, kernel, token_tree(BRANCHING), costs)
    assert means == pytest.approx(BRANCHING_MEANS, abs=1e-4)


@pytest.mark.parametrize("kernel", [k for k in ONE_PREFIX if k is not Kernel.MULTI_ITEM])
def test_b26_siblings_of_a_prefill_tree_do_not_see_one_another(
    kernel: Kernel, costs: CostTable
) -> None:
    means, _ = answers(Phase.PREFILL, kernel, token_tree(BRANCHING), costs)
    assert means == pytest.approx(BRANCHING_MEANS, abs=1e-4)


@pytest.mark.parametrize("kernel", DECODE)
def test_b26_siblings_far_below_the_diagonal_do_not_see_one_another(
    kernel: Kernel, costs: CostTable
) -> None:
    parents = (-1, *((n - 1) // 2 for n in range(1, 150)))
    means, _ = answers(Phase.DECODE, kernel, token_tree(parents), costs)
    chains: list[list[int]] = []
    for token, parent in enumerate(parents):
        chains.append([*(chains[parent] if parent >= 0 else []), token])
    assert means == pytest.approx([np.square(chain).mean() for chain in chains], rel=1e-5)


@pytest.mark.parametrize("batch", [1, 7, 8, 128])
@pytest.mark.parametrize("kernel", ONE_PREFIX)
def test_b23_identical_requests_over_a_long_prefix_answer_alike(
    kernel: Kernel, batch: int, costs: CostTable
) -> None:
    shape = head_shape(32, 8, 16)
    layout = items_over(1024, [4] * batch)
    inputs = z_inputs(layout, shape)
    one_item = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(batch))
    inputs.kv.k_rows.copy_(one_item.repeat(batch, 1, 1))
    inputs.kv.v_rows.copy_(one_item.repeat(batch, 1, 1))
    q = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(1)).repeat(batch, 1, 1)
    strategy = strategies(shape, device=CPU, dtype=torch.float32, costs=costs)[
        Phase.PREFILL, kernel
    ]
    out, lse = strategy.run(strategy.plan(layout), q, inputs.kv)
    alone = strategy.run(strategy.plan(items_over(1024, [4])), q[:4], inputs.kv)
    torch.testing.assert_close(out, alone.out.repeat(batch, 1, 1), atol=0, rtol=1e-4)
    torch.testing.assert_close(lse, alone.lse.repeat(batch, 1), atol=1e-5, rtol=0)
    assert lse.is_contiguous()
