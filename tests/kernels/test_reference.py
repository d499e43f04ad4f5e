"""The oracle itself, against means worked out by hand."""

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

SHAPE = head_shape(4, 2, 8)


def means(layout: AttentionLayout) -> list[float]:
    inputs = z_inputs(layout, SHAPE)
    return floats(reference.attention(layout, inputs.q, inputs.kv, SHAPE).out[:, 0, 0])


def test_item_rows_see_the_prefix_and_their_own_item() -> None:
    expected = [3.5, 6.0, 7.5, 10.25, 18.0, 25.6667]
    assert means(items_over(3, [2, 1, 3])) == pytest.approx(expected, abs=1e-4)


def test_rows_of_a_tree_see_their_ancestors() -> None:
    nodes = [Node(parent=parent, tokens=1) for parent in (-1, 0, 1, 1, 2, 3)]
    layout = make_layout(nodes, [Segment(node=node) for node in range(6)], page_size=1)
    assert means(layout) == pytest.approx([0, 0.5, 1.6667, 3.3333, 5.25, 8.75], abs=1e-4)


def test_tree_mask_agrees_with_chains() -> None:
    mask = reference.tree_mask((-1, 0, 1, 1, 2, 3))
    squares = torch.arange(6, dtype=torch.float64).square()
    rows = (mask * squares).sum(dim=1) / mask.sum(dim=1)
    assert floats(rows) == pytest.approx([0, 0.5, 1.6667, 3.3333, 5.25, 8.75], abs=1e-4)


def test_rows_before_the_first_token_see_nothing() -> None:
    inputs = z_inputs(make_layout([Node(tokens=1)], [Segment(rows=3)]), SHAPE)
    inputs.kv.v_pages.fill_(7)
    out, lse = reference.attention(inputs.layout, inputs.q, inputs.kv, SHAPE)
    assert floats(out[:, 0, 0]) == [0, 0, 7]
    assert floats(lse[:, 0]) == [-torch.inf, -torch.inf, 0]
