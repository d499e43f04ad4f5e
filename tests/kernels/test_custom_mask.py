"""Masks that the caller gives: speculation trees, blind rows, wrong shapes."""

import numpy as np
import pytest
import torch
from tests.kernels.forests import (
    Node,
    Segment,
    floats,
    head_shape,
    make_layout,
    random_inputs,
    z_inputs,
)

from stemserve.kernels import reference
from stemserve.kernels.torch_paths.custom_mask import CustomMaskAttention
from stemserve.kernels.torch_paths.packed_mask import Bool, PackedMask

SHAPE = head_shape(6, 2, 64)
BRANCHING = (-1, 0, 1, 1, 2, 3)


def custom_mask() -> CustomMaskAttention:
    return CustomMaskAttention(SHAPE, torch.device("cpu"))


def draft_mask(prefix: int, parents: tuple[int, ...]) -> Bool:
    tree = np.array([[bool(bit) for bit in row] for row in reference.tree_mask(parents)])
    return np.hstack([np.ones((len(parents), prefix), np.bool_), tree])


@pytest.mark.parametrize("padding", [0, 3])
def test_b26_a_speculation_tree_is_verified_in_one_request(padding: int) -> None:
    tokens = 6 + padding
    layout = make_layout([Node(tokens=tokens)], [Segment(rows=tokens)])
    parents = (*BRANCHING, *[-1] * padding)
    inputs = z_inputs(layout, SHAPE)
    strategy = custom_mask()
    plan = strategy.plan_masked(layout, PackedMask.pack([draft_mask(0, parents)]))
    means = floats(strategy.run(plan, inputs.q, inputs.kv).out[:6, 0, 0])
    assert means == pytest.approx([0, 0.5, 1.6667, 3.3333, 5.25, 8.75], abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_b26_large_speculation_trees_over_prefixes_are_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, prefixes = rng.integers(130, 170, size=2), rng.integers(0, 50, size=2)
    nodes = [Node(tokens=int(p + n)) for p, n in zip(prefixes, sizes, strict=True)]
    segments = [Segment(node=i, rows=int(n)) for i, n in enumerate(sizes)]
    layout = make_layout(nodes, segments, shuffle=rng)
    parents = [(-1, *(int(rng.integers(0, t)) for t in range(1, n))) for n in sizes]
    masks = [draft_mask(int(p), tree) for p, tree in zip(prefixes, parents, strict=True)]
    inputs = random_inputs(layout, SHAPE, seed)
    strategy = custom_mask()
    state = strategy.run(strategy.plan_masked(layout, PackedMask.pack(masks)), inputs.q, inputs.kv)
    for request, mask in enumerate(masks):
        rows = slice(*layout.segment_indptr[request : request + 2].tolist())
        keys, values = reference.gather_chain(layout, request, inputs.kv)
        seen = torch.tensor(mask.tolist())
        expected = reference.masked_attention(inputs.q[rows], keys, values, seen, SHAPE)
        torch.testing.assert_close(state.out[rows].double(), expected.out, atol=2e-5, rtol=0)
        torch.testing.assert_close(state.lse[rows].double(), expected.lse, atol=2e-5, rtol=0)


def test_a_row_whose_bits_are_all_0_answers_0() -> None:
    layout = make_layout([Node(tokens=3)], [Segment(rows=3)])
    mask = np.array([[1, 0, 0], [0, 0, 0], [0, 1, 1]], np.bool_)
    inputs = z_inputs(layout, SHAPE)
    strategy = custom_mask()
    plan = strategy.plan_masked(layout, PackedMask.pack([mask]))
    out, lse = strategy.run(plan, inputs.q, inputs.kv)
    assert floats(out[:, 0, 0]) == pytest.approx([0, 0, 2.5])
    assert lse[1, 0].item() == -torch.inf


def test_b25_a_mask_does_not_outlive_its_plan() -> None:
    layout = make_layout([Node(tokens=5)], [Segment(rows=2)])
    inputs = random_inputs(layout, SHAPE, seed=4)
    strategy = custom_mask()
    masked = strategy.plan_masked(layout, PackedMask.pack([np.eye(2, 5, dtype=np.bool_)]))
    strategy.run(masked, inputs.q, inputs.kv)
    again = strategy.run(strategy.plan(layout), inputs.q, inputs.kv)
    fresh = custom_mask()
    torch.testing.assert_close(
        again.out, fresh.run(fresh.plan(layout), inputs.q, inputs.kv).out, atol=0, rtol=0
    )


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (2, 6)])
def test_b25_a_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    layout = make_layout([Node(tokens=5)], [Segment(rows=2)])
    with pytest.raises(ValueError, match="needs masks of"):
        custom_mask().plan_masked(layout, PackedMask.pack([np.ones(shape, np.bool_)]))


def test_a_mask_too_large_to_build_is_refused() -> None:
    layout = make_layout([Node(tokens=40000)], [Segment(rows=20000)])
    assert "limit" in str(custom_mask().refusal(layout))
