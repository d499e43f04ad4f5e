"""The numbered cases in the tree kernel: Q is 0, so an answer is the mean of j squared over what
a row sees.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import DEVICE, DIVISION
from tests.kernels.forests import (
    Node,
    Segment,
    floats,
    head_shape,
    items_over,
    make_layout,
    z_inputs,
)

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Phase

SHAPE = head_shape(6, 2, 16)
DIVISIONS = [DIVISION, Division(fixed_split=64)]
BRANCHING = (-1, 0, 1, 1, 2, 3)
BRANCHING_MEANS = [0, 0.5, 1.6667, 3.3333, 5.25, 8.75]


def tree(phase: Phase, division: Division) -> CodecDecode:
    numbers = DecodeNumbers(dtype=torch.float32)
    return CodecDecode(SHAPE, DEVICE, numbers, 3, phase=phase, division=division)


def answers(
    layout: AttentionLayout, phase: Phase = Phase.PREFILL, division: Division = DIVISION
) -> tuple[list[float], list[float]]:
    """The mean that each row answers with, the same in every head and channel; and the LSE."""
    strategy = tree(phase, division)
    assert strategy.refusal(layout) is None
    inputs = z_inputs(layout, SHAPE)
    kv = LayerKV(*(tensor.to(DEVICE) for tensor in inputs.kv))
    out, lse = strategy.run(strategy.plan(layout), inputs.q.to(DEVICE), kv)
    torch.testing.assert_close(out, out[:, :1, :1].expand_as(out), atol=0, rtol=1e-5)
    return floats(out[:, 0, 0]), floats(lse[:, 0])


@pytest.mark.parametrize("division", DIVISIONS, ids=["even", "fixed"])
@pytest.mark.parametrize("cached", [32, 0, 39])
def test_b09_items_after_a_partly_cached_prefix(cached: int, division: Division) -> None:
    segments = [Segment(rows=40 - cached)]
    segments += [Segment(rows=rows, is_item=True) for rows in (3, 1, 5)]
    means, _ = answers(make_layout([Node(tokens=40)], segments), division=division)
    assert means[40 - cached + 3] == pytest.approx(546.0732, abs=1e-3)
    context = [np.square(np.arange(j + 1)).mean() for j in range(cached, 40)]
    assert means[: 40 - cached] == pytest.approx(context, rel=1e-5)
    own = [range(40, 43), range(43, 44), range(44, 49)]
    items = [(20540 + np.cumsum(np.square(j))) / (40 + np.arange(1, len(j) + 1)) for j in own]
    assert means[40 - cached :] == pytest.approx(np.concatenate(items), rel=1e-5)


@pytest.mark.parametrize("division", DIVISIONS, ids=["even", "fixed"])
def test_b10_b12_items_do_not_see_one_another(division: Division) -> None:
    means, _ = answers(items_over(3, [2, 1, 3]), division=division)
    assert means == pytest.approx([3.5, 6.0, 7.5, 10.25, 18.0, 25.6667], abs=1e-4)


def test_b12_decoding_refuses_items() -> None:
    assert "item" in str(tree(Phase.DECODE, DIVISION).refusal(items_over(3, [2, 1, 3])))


@pytest.mark.parametrize("division", DIVISIONS, ids=["even", "fixed"])
def test_b14_an_empty_item_moves_no_other(division: Division) -> None:
    means, _ = answers(items_over(3, [2, 0, 3]), division=division)
    assert means == pytest.approx([3.5, 6.0, 7.5, 13.2, 19.1667], abs=1e-4)


def test_b14_items_of_very_uneven_lengths() -> None:
    means, _ = answers(items_over(3, [1, 400, 1]))
    sums = 5 + np.cumsum(np.square(np.arange(4, 404, dtype=np.float64)))
    expected = [3.5, *(sums / np.arange(4, 404)), (5 + 404**2) / 4]
    assert means == pytest.approx(expected, rel=1e-4)


def test_b14_two_hundred_equal_items_over_no_context() -> None:
    segments = [Segment(node=-1, is_item=True)] * 200
    means, lses = answers(make_layout([], segments))
    assert means == pytest.approx([j**2 for j in range(200)])
    assert lses == pytest.approx([0.0] * 200, abs=1e-6)


@pytest.mark.parametrize("lengths", [(3, 3), (3, 4)])
@pytest.mark.parametrize("is_item", [False, True])
def test_b18_rows_are_causal_whether_lengths_are_equal_or_not(
    lengths: tuple[int, int], is_item: bool
) -> None:
    nodes = [] if is_item else [Node(tokens=tokens) for tokens in lengths]
    segments = [
        Segment(node=-1 if is_item else node, rows=rows, is_item=is_item)
        for node, rows in enumerate(lengths)
    ]
    means, _ = answers(make_layout(nodes, segments))
    assert means[:3] == pytest.approx([0, 0.5, 1.6667], abs=1e-4)
    second = np.cumsum(np.square(np.arange(3, 3 + lengths[1]))) / np.arange(1, lengths[1] + 1)
    assert means[3:] == pytest.approx(second.tolist(), rel=1e-5)


@pytest.mark.parametrize("division", DIVISIONS, ids=["even", "fixed"])
def test_b21_the_lse_is_a_natural_logarithm_of_all_parts(division: Division) -> None:
    _, lses = answers(make_layout([Node(tokens=500)], [Segment()]), Phase.DECODE, division)
    assert lses == pytest.approx([np.log(500)], abs=1e-5)


@pytest.mark.parametrize("division", DIVISIONS, ids=["even", "fixed"])
def test_b22_rows_before_the_first_token_see_nothing(division: Division) -> None:
    layout = make_layout([Node(tokens=2)], [Segment(rows=4)])
    means, lses = answers(layout, division=division)
    assert means == pytest.approx([0, 0, 0, 0.5])
    assert lses == pytest.approx([-np.inf, -np.inf, 0, np.log(2)], abs=1e-6)


@pytest.mark.parametrize("empty", [-1, 1])
def test_b22_a_request_without_tokens_moves_no_other(empty: int) -> None:
    nodes = [Node(tokens=3), Node(tokens=0), Node(tokens=2)]
    layout = make_layout(nodes, [Segment(node=0), Segment(node=empty), Segment(node=2)])
    means, lses = answers(layout, Phase.DECODE)
    assert means == pytest.approx([1.6667, 0, 12.5], abs=1e-4)
    assert lses == pytest.approx([np.log(3), -np.inf, np.log(2)], abs=1e-6)


@pytest.mark.parametrize("requests", [1, 7, 8, 128])
def test_b23_identical_requests_over_a_long_prefix_answer_alike(requests: int) -> None:
    layout = items_over(1024, [4] * requests)
    inputs = z_inputs(layout, SHAPE)
    one = torch.randn(4, 2, 16)
    inputs.kv.k_rows.copy_(one.repeat(requests, 1, 1))
    inputs.kv.v_rows.copy_(one.repeat(requests, 1, 1))
    q = torch.randn(4, 6, 16).repeat(requests, 1, 1).to(DEVICE)
    kv = LayerKV(*(tensor.to(DEVICE) for tensor in inputs.kv))
    strategy = tree(Phase.PREFILL, DIVISION)
    out, lse = strategy.run(strategy.plan(layout), q, kv)
    alone = strategy.run(strategy.plan(items_over(1024, [4])), q[:4], kv)
    torch.testing.assert_close(out, alone.out.repeat(requests, 1, 1), atol=0, rtol=1e-4)
    torch.testing.assert_close(lse, alone.lse.repeat(requests, 1), atol=1e-5, rtol=0)
    assert lse.is_contiguous()


def token_tree(parents: tuple[int, ...]) -> AttentionLayout:
    """A node and a one-row segment for every token of a tree, in pages of 16 slots."""
    nodes = [Node(parent=parent, tokens=1) for parent in parents]
    return make_layout(nodes, [Segment(node=node) for node in range(len(nodes))])


@pytest.mark.parametrize("phase", Phase)
def test_b26_siblings_of_a_tree_do_not_see_one_another(phase: Phase) -> None:
    means, _ = answers(token_tree(BRANCHING), phase)
    assert means == pytest.approx(BRANCHING_MEANS, abs=1e-4)


def test_b26_siblings_far_below_the_diagonal_do_not_see_one_another() -> None:
    parents = (-1, *((n - 1) // 2 for n in range(1, 150)))
    means, _ = answers(token_tree(parents), Phase.DECODE)
    chains: list[list[int]] = []
    for token, parent in enumerate(parents):
        chains.append([*(chains[parent] if parent >= 0 else []), token])
    assert means == pytest.approx([np.square(chain).mean() for chain in chains], rel=1e-5)


def test_b08_later_runs_are_equal_bit_by_bit() -> None:
    layout = make_layout(
        [Node(tokens=320), *[Node(parent=0, tokens=40)] * 20], [Segment(node=n) for n in range(21)]
    )
    inputs = z_inputs(layout, SHAPE)
    kv = LayerKV(*(tensor.to(DEVICE) for tensor in inputs.kv))
    q = torch.randn(layout.num_rows, 6, 16).to(DEVICE)
    strategy = tree(Phase.DECODE, DIVISION)
    runs = [strategy.run(strategy.plan(layout), q, kv) for _ in range(3)]
    for state in runs[1:]:
        assert torch.equal(state.out, runs[0].out) and torch.equal(state.lse, runs[0].lse)
