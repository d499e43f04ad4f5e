"""Deterministic attention in torch."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
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
from tests.kernels.sequences import Sequences
from torch import Tensor

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.fixed.blocks import KEYS, ROWS, FixedBlocks
from stemserve.kernels.strategy import Kernel, Phase

CPU = torch.device("cpu")


def run(inputs: Inputs, phase: Phase = Phase.PREFILL) -> AttentionState:
    strategy = FixedBlocks(inputs.shape, CPU, phase)
    assert strategy.refusal(inputs.layout) is None
    return strategy.run(strategy.plan(inputs.layout), inputs.q, inputs.kv)


def check_against_definition(inputs: Inputs, phase: Phase = Phase.PREFILL) -> None:
    expected = reference.attention(inputs.layout, inputs.q, inputs.kv, inputs.shape)
    found = run(inputs, phase)
    torch.testing.assert_close(found.out.double(), expected.out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.lse.double(), expected.lse, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("phase", Phase)
def test_random_forests_agree_with_the_definition(phase: Phase, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, page_size=16, decode=phase is Phase.DECODE)
    check_against_definition(random_inputs(layout, head_shape(6, 2, 8), seed), phase)


@pytest.mark.parametrize("context", [0, 3, KEYS - 1, KEYS, 2 * KEYS + 9])
def test_items_over_several_blocks_of_keys_agree_with_the_definition(context: int) -> None:
    layout = items_over(context, [1, ROWS, 0, KEYS + 5])
    check_against_definition(random_inputs(layout, head_shape(2, 2, 8), context))


def ways(context: int, rows: int) -> list[Sequence[tuple[int, bool]]]:
    """Cuts of the rows after a context, each (where a part ends, whether it is an item)."""
    end = context + rows
    one_by_one = [(token + 1, False) for token in range(context, end)]
    middle = context + rows // 3
    return [[(end, True)], [(end, False)], [(middle, False), (end, False)], one_by_one]


@pytest.mark.parametrize(
    ("context", "rows"), [(0, 40), (21, 9), (KEYS - 8, 30), (2 * KEYS, 17), (500, 75)]
)
def test_rows_of_an_item_a_chunk_and_a_decode_step_have_the_same_bits(
    context: int, rows: int
) -> None:
    shape = head_shape(6, 2, 16)
    sequences = Sequences(shape, seed=rows, lengths=[context + rows, 300], dtype=torch.float32)
    found: list[Tensor] = []
    for parts in ways(context, rows):
        for neighbour in (None, 1):
            inputs = sequences.inputs(0, context, parts, neighbour=neighbour)
            found.append(run(inputs).out[:rows])
    one_by_one = sequences.inputs(0, context, ways(context, rows)[-1], neighbour=None)
    found.append(run(one_by_one, Phase.DECODE).out)
    for out in found[1:]:
        assert torch.equal(out, found[0])


def test_work_counts_the_blocks_that_are_read() -> None:
    segments = [Segment(rows=20, is_item=True), Segment(rows=3), Segment(rows=0)]
    layout = make_layout([Node(tokens=KEYS - 4)], segments)
    work = FixedBlocks(head_shape(1, 1, 8), CPU, Phase.PREFILL).work(layout)
    # Rows 252..271 lie in three blocks of rows, 249..251 in one.
    assert work.kv_tokens.tolist() == [KEYS, 2 * KEYS, 2 * KEYS, KEYS]
    assert work.launches == 6


@pytest.mark.parametrize(
    ("phase", "kernel"), [(Phase.PREFILL, Kernel.RAGGED), (Phase.DECODE, Kernel.PAGED)]
)
def test_it_is_called_after_the_strategy_that_reads_the_same(phase: Phase, kernel: Kernel) -> None:
    assert FixedBlocks(head_shape(1, 1, 8), CPU, phase).kernel is kernel


def test_decode_refuses_items() -> None:
    refusal = FixedBlocks(head_shape(1, 1, 8), CPU, Phase.DECODE).refusal(items_over(3, [1]))
    assert refusal is not None
