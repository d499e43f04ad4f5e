"""The dense kernel's planner in C against the one in numpy: the same tables, entry by entry."""

from dataclasses import replace

import pytest
from tests.kernels.dense_forests import SPELT_OUT, random_forest
from tests.kernels.forests import Node, Segment, items_over, make_layout

from stemserve.kernels.dense.native import NativeDense
from stemserve.kernels.dense.packed import PackedPlan, pack
from stemserve.kernels.dense.plan import DenseHost
from stemserve.kernels.layout import AttentionLayout, int32
from stemserve.kernels.strategy import Kernel

HEADS = 4


def numpy_plan(layout: AttentionLayout, ctas: int) -> PackedPlan:
    host = DenseHost(kernel=Kernel.CASCADE, query_heads=HEADS, ctas=ctas)
    return pack(host.plan(layout), HEADS, ctas)


def assert_same(found: PackedPlan, expected: PackedPlan) -> None:
    names = ("sources", "row_first", "row_seen")
    for name in names:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.host(found.joined).tolist() == theirs.host(expected.joined).tolist(), name
    assert found.partial_rows == expected.partial_rows
    assert len(found.stages) == len(expected.stages)
    for stage, other in zip(found.stages, expected.stages, strict=True):
        for name in ("items", "blocks", "parts", "targets"):
            ours, theirs = getattr(stage, name), getattr(other, name)
            assert ours.shape == theirs.shape, name
            assert ours.host(found.joined).tolist() == theirs.host(expected.joined).tolist(), name
            assert ours.start % 4 == 0
    for part, other_part in zip(found.work.parts, expected.work.parts, strict=True):
        assert part.engine == other_part.engine
        assert part.rows.tolist() == other_part.rows.tolist()
        assert part.kv_tokens.tolist() == other_part.kv_tokens.tolist()
        assert part.tokens_once == other_part.tokens_once


def assert_equal(layout: AttentionLayout, ctas: int, planner: NativeDense | None = None) -> None:
    planner = planner or NativeDense(HEADS, ctas)
    expected = numpy_plan(layout, ctas)
    for _ in range(2):  # the second time in the memory of the first
        assert_same(planner.plan(layout), expected)


@pytest.mark.parametrize("layout", SPELT_OUT.values(), ids=SPELT_OUT.keys())
@pytest.mark.parametrize("ctas", [1, 7, 132])
def test_the_tables_of_these_forests_are_those_of_numpy(layout: AttentionLayout, ctas: int) -> None:
    assert_equal(layout, ctas)


@pytest.mark.parametrize("seed", range(80))
def test_the_tables_of_any_forest_are_those_of_numpy(seed: int) -> None:
    assert_equal(random_forest(seed), (1, 40, 132)[seed // 4 % 3])


def test_a_planner_may_plan_large_and_small_forests_in_turn() -> None:
    planner = NativeDense(HEADS, 33)
    for seed in range(12):
        assert_equal(random_forest(seed), 33, planner)
        assert_equal(items_over(2000 * (seed % 3), [64] * 40), 33, planner)


@pytest.mark.parametrize("cached", [1, 130, 8192])
def test_few_long_tiles_are_divided_as_numpy_divides_them(cached: int) -> None:
    for items in ([4], [4] * 32, [130, 1, 77]):
        assert_equal(items_over(cached, items), 132)


def test_a_layout_that_is_no_forest_is_refused() -> None:
    layout = make_layout([Node(tokens=16), Node(parent=0, tokens=5)], [Segment(node=1, rows=2)])
    planner = NativeDense(HEADS, 132)
    for broken in (
        replace(layout, node_parent=int32([-1, 1])),
        replace(layout, segment_node=int32([2])),
        replace(layout, node_tokens=int32([1 << 20, 5])),
        replace(layout, segment_indptr=int32([0, -1])),
    ):
        with pytest.raises(ValueError, match="not a forest"):
            planner.plan(broken)
