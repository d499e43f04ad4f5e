"""Prefill by the tree kernel with fixed splits; in Triton's interpreter where there is no GPU."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.forests import (
    Inputs,
    Node,
    Segment,
    head_shape,
    items_over,
    make_layout,
    random_inputs,
    random_layout,
)
from tests.kernels.row_products import alike_rows
from tests.kernels.sequences import Sequences

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.fixed.tree import FixedTree
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.strategy import Phase

__all__ = ["alike_rows"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPLIT = 64  # few tokens, so that short chains have several parts


def fixed_tree(shape: HeadShape, dtype: torch.dtype, phase: Phase = Phase.PREFILL) -> CodecDecode:
    division = Division(fixed_split=SPLIT)
    numbers = DecodeNumbers(dtype=dtype)
    return CodecDecode(shape, DEVICE, numbers, 3, phase=phase, division=division)


def run(inputs: Inputs) -> AttentionState:
    strategy = FixedTree(fixed_tree(inputs.shape, inputs.q.dtype))
    assert strategy.refusal(inputs.layout) is None
    plan = strategy.plan(inputs.layout)
    kv = LayerKV(*(part.to(DEVICE) for part in inputs.kv))
    state = strategy.run(plan, inputs.q.to(DEVICE), kv)
    assert strategy.work(inputs.layout).kv_tokens_read == plan.work.kv_tokens_read
    return AttentionState(state.out.cpu(), state.lse.cpu())


@pytest.mark.parametrize("seed", range(4))
def test_random_forests_agree_with_the_definition(seed: int) -> None:
    layout = random_layout(np.random.default_rng(seed), page_size=16)
    inputs = random_inputs(layout, head_shape(4, 2, 16), seed)
    expected = reference.attention(layout, inputs.q, inputs.kv, inputs.shape)
    found = run(inputs)
    torch.testing.assert_close(found.out.double(), expected.out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.lse.double(), expected.lse, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("context", [0, 5, 48, 61, 150])
def test_items_of_a_context_with_a_partial_page_agree_with_the_definition(context: int) -> None:
    inputs = random_inputs(items_over(context, [1, 20, 0, 90]), head_shape(2, 1, 16), context)
    expected = reference.attention(inputs.layout, inputs.q, inputs.kv, inputs.shape)
    torch.testing.assert_close(run(inputs).out.double(), expected.out, atol=2e-5, rtol=1e-4)


def test_a_context_that_ends_beside_its_items_is_read_to_its_end() -> None:
    segments = [Segment(rows=9), Segment(rows=30, is_item=True), Segment(rows=1)]
    layout = make_layout([Node(tokens=75)], segments)
    inputs = random_inputs(layout, head_shape(2, 1, 16), 3)
    expected = reference.attention(layout, inputs.q, inputs.kv, inputs.shape)
    torch.testing.assert_close(run(inputs).out.double(), expected.out, atol=2e-5, rtol=1e-4)


def ways(context: int, rows: int) -> list[Sequence[tuple[int, bool]]]:
    """Cuts of the rows after a context, each (where a part ends, whether it is an item)."""
    end = context + rows
    one_by_one = [(token + 1, False) for token in range(context, end)]
    middle = context + rows // 3
    return [[(end, True)], [(end, False)], [(middle, False), (end, False)], one_by_one]


@pytest.mark.parametrize(("context", "rows"), [(0, 9), (58, 9), (118, 12)])
def test_rows_of_an_item_a_chunk_and_a_decode_step_have_the_same_bits(
    context: int, rows: int
) -> None:
    shape = head_shape(4, 2, 16)
    sequences = Sequences(shape, seed=context, lengths=[context + rows, 40], dtype=torch.float16)
    found: list[Tensor] = []
    for parts in ways(context, rows):
        for neighbour in (False, True):
            inputs = sequences.inputs(0, context, parts, neighbour=1 if neighbour else None)
            found.append(run(inputs).out[:rows])
    for out in found[1:]:
        assert torch.equal(out, found[0])


def test_a_strategy_without_fixed_splits_is_refused() -> None:
    numbers = DecodeNumbers(dtype=torch.float16)
    tree = CodecDecode(head_shape(2, 1, 16), DEVICE, numbers, 3, phase=Phase.PREFILL)
    with pytest.raises(ValueError, match="fixed splits"):
        FixedTree(tree)
