"""The dense kernel's plans, read in float64, against the oracle."""

import numpy as np
import pytest
import torch
from tests.kernels.dense_forests import SPELT_OUT, random_forest
from tests.kernels.dense_reader import read_plan
from tests.kernels.forests import Node, Segment, head_shape, make_layout, random_inputs

from stemserve.kernels import reference
from stemserve.kernels.dense.plan import DenseHost
from stemserve.kernels.dense.streams import streams
from stemserve.kernels.dense.tables import BLOCK_TOKENS, TILE_ROWS
from stemserve.kernels.dense.tiles import steps
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Kernel

SHAPE = head_shape(2, 1, 8)
KERNELS = [Kernel.CASCADE, Kernel.SPLIT]


def host(kernel: Kernel, ctas: int = 1) -> DenseHost:
    return DenseHost(kernel=kernel, query_heads=SHAPE.query_heads, ctas=ctas)


def assert_oracle(kernel: Kernel, layout: AttentionLayout, seed: int) -> None:
    inputs = random_inputs(layout, SHAPE, seed)
    ctas = (1, 40)[seed // 4 % 2]
    state = read_plan(host(kernel, ctas).plan(layout), inputs.q, inputs.kv, SHAPE)
    expected = reference.attention(layout, inputs.q, inputs.kv, SHAPE)
    torch.testing.assert_close(state.out, expected.out, atol=1e-9, rtol=0)
    torch.testing.assert_close(state.lse, expected.lse, atol=1e-9, rtol=0)


@pytest.mark.parametrize("layout", SPELT_OUT.values(), ids=SPELT_OUT.keys())
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_of_these_forests_is_the_oracle(kernel: Kernel, layout: AttentionLayout) -> None:
    assert_oracle(kernel, layout, seed=1)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_of_any_forest_is_the_oracle(kernel: Kernel, seed: int) -> None:
    assert_oracle(kernel, random_forest(seed), seed)


def test_a_cold_prompt_and_its_items_are_read_where_they_are() -> None:
    segments = [Segment(rows=700), *[Segment(rows=30, is_item=True)] * 10]
    assert not len(streams(make_layout([Node(tokens=700)], segments)).sources)


def test_a_stored_prefix_is_copied_once_for_all_that_read_it() -> None:
    nodes = [Node(tokens=512), *[Node(parent=0, tokens=40) for _ in range(9)]]
    layout = make_layout(nodes, [Segment(node=n, rows=40) for n in range(1, 10)])
    assert len(streams(layout).sources) == 512


def test_short_items_share_a_tile_and_the_read_of_the_prefix() -> None:
    layout = make_layout([Node(tokens=1024)], [Segment(rows=4, is_item=True)] * 32)
    (stage,) = host(Kernel.CASCADE).plan(layout).stages
    assert stage.division.tiles[:, 1].tolist() == [TILE_ROWS]
    assert steps(stage.division.tiles).tolist() == [1024 // BLOCK_TOKENS + 1]
    assert stage.tokens_read == 1024 + 128


def test_split_reads_the_prefix_once_an_item() -> None:
    layout = make_layout([Node(tokens=1024)], [Segment(rows=4, is_item=True)] * 32)
    (stage,) = host(Kernel.SPLIT).plan(layout).stages
    assert stage.tokens_read == 32 * (1024 + 4)


def test_tiles_are_sorted_by_length() -> None:
    segments = [Segment(rows=900), *[Segment(rows=70, is_item=True)] * 3]
    (stage,) = host(Kernel.CASCADE).plan(make_layout([Node(tokens=900)], segments)).stages
    assert (np.diff(steps(stage.division.tiles)) <= 0).all()


def test_a_long_prompt_has_few_blocks() -> None:
    layout = make_layout([Node(tokens=20_000)], [Segment(rows=20_000)])
    (stage,) = host(Kernel.CASCADE).plan(layout).stages
    assert len(stage.blocks) <= 2 * len(stage.division.tiles) + 1


def test_few_long_tiles_are_divided_over_the_ctas() -> None:
    layout = make_layout([Node(tokens=8196)], [Segment(rows=4, is_item=True)] * 100)
    (stage,) = host(Kernel.CASCADE, ctas=132).plan(layout).stages
    tiles = stage.division.tiles
    assert steps(tiles).sum() == 4 * 65 + 4
    assert len(tiles) * SHAPE.query_heads > 100
    assert steps(tiles).max() <= 7
    assert stage.division.targets.tolist() == list(range(400))


def test_what_fills_the_device_is_not_divided() -> None:
    segments = [Segment(rows=4, is_item=True)] * 100
    layout = make_layout([Node(tokens=8196)], [Segment(rows=8196), *segments])
    (stage,) = host(Kernel.CASCADE, ctas=40).plan(layout).stages
    assert not stage.division.partial_rows
