"""Faults that shared-prefix kernels have had, each tried on every strategy that could have it."""

import inspect

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import DEVICE, assert_close, check, expected, run_poisoned
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, random_kv
from tests.kernels.every_strategy import SHAPE, check_all, decode_layout, every_strategy, run
from tests.kernels.forests import (
    Node,
    Segment,
    head_shape,
    items_over,
    make_layout,
    random_inputs,
)

from stemserve.kernels.attention_state import LayerKV, merge_states
from stemserve.kernels.codec import kernels_triton
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.flashinfer_paths.backends import Backend
from stemserve.kernels.flashinfer_paths.costs import fa2_engine
from stemserve.kernels.flashinfer_paths.tree_tables import (
    multi_item_refusal,
    multi_item_tables,
)
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.strategy import Phase


def test_pitfall_01_empty_nodes_and_requests_without_kv_give_0_and_minus_infinity(
    costs: CostTable,
) -> None:
    nodes = [Node(tokens=0), Node(parent=0, tokens=32), Node(parent=1, tokens=0)]
    nodes += [Node(parent=2, tokens=5), Node(tokens=0)]
    layout = decode_layout(nodes, [3, 4, 2, -1, 0])
    check_all(layout, Phase.DECODE, costs)
    inputs = random_inputs(layout, SHAPE, 0)
    for strategy in every_strategy(Phase.DECODE, SHAPE, costs):
        out, lse = run(strategy, inputs)
        assert not out[[1, 3, 4]].any() and lse[[1, 3, 4]].isneginf().all()


def test_pitfall_02_merging_nothing_with_nothing_is_nothing_and_garbage_behind_a_mask_stays_there(
    costs: CostTable,
) -> None:
    nothing, garbage = torch.full((2, 1, 2), -torch.inf), torch.full((2, 1, 2, 8), torch.nan)
    out, lse = merge_states(garbage, nothing)
    assert not out.any() and lse.isneginf().all()
    # Some rows see nothing of a piece, others all of it; unused slots and partials hold NaN.
    check(layout_of([(-1, 3), *[(0, 70)] * 5], [(n, 1) for n in range(1, 6)]), (4, 1, 32), bins=7)
    check_all(make_layout([Node(tokens=5)], [Segment(rows=9)]), Phase.PREFILL, costs)


def test_pitfall_03_the_lse_is_natural_and_holds_the_scale(costs: CostTable) -> None:
    """One key: the LSE is its score."""
    inputs = random_inputs(decode_layout([Node(tokens=1)], [0]), SHAPE, 3)
    keys = inputs.kv.k_pages[inputs.layout.node_pages[0], 0].repeat_interleave(2, dim=0)
    score = (inputs.q[0] * keys).sum(-1) * SHAPE.scale
    for strategy in every_strategy(Phase.DECODE, SHAPE, costs):
        torch.testing.assert_close(run(strategy, inputs).lse[0], score, atol=1e-5, rtol=0)


def test_pitfall_04_uint16_limits_of_multi_item_scoring_are_refused(costs: CostTable) -> None:
    assert multi_item_refusal(items_over(8, [65_535])) is None
    assert "65535" in str(multi_item_refusal(items_over(8, [65_536])))
    # Only paged kernels know the mask; delimiters are none of ours.
    batch = multi_item_tables(items_over(8, [3, 2])).batch
    assert batch.pages is not None and batch.items is not None
    assert batch.items.places.dtype == np.uint16 and batch.items.prefix_tokens.dtype == np.uint32
    check_all(items_over(8, [3, 2, 7]), Phase.PREFILL, costs)


def test_pitfall_05_last_pages_are_partly_filled_at_every_level(costs: CostTable) -> None:
    segments = [Segment(rows=rows, is_item=True) for rows in (1, 5, 20)]
    check_all(make_layout([Node(tokens=300)], segments), Phase.PREFILL, costs)
    nodes = [Node(tokens=304), Node(parent=0, tokens=13), Node(parent=0, tokens=16)]
    nodes += [Node(parent=2, tokens=33)]
    check_all(decode_layout(nodes, [1, 3, 0, 2]), Phase.DECODE, costs)


def test_pitfall_06_beams_that_change_their_parents_are_planned_anew(costs: CostTable) -> None:
    nodes = [Node(tokens=48), *[Node(parent=0, tokens=n) for n in (3, 16, 9, 1)]]
    for ends in ([1, 2, 3, 4], [2, 2, 4, 1], [4, 3, 2, 1]):
        check_all(decode_layout(nodes, ends), Phase.DECODE, costs)
    shape, numbers = SHAPE, DecodeNumbers(dtype=torch.float32)
    decode = CodecDecode(shape, DEVICE, numbers, 4)
    forest: Nodes = [(-1, 48), (0, 3), (0, 16), (0, 9), (0, 1)]
    plan = decode.plan(layout_of(forest, leaves_of(forest)))
    kv = random_kv(layout_of(forest, []), shape, torch.float32, DEVICE)
    reordered = layout_of(forest, [(2, 1), (2, 1), (4, 1), (1, 1)])
    q = torch.randn((4, 4, 64), device=DEVICE)
    assert not decode.grow(plan, reordered) and decode.replan(plan, reordered)
    state = run_poisoned(decode, plan, q, kv)
    assert_close(state, expected(reordered, q, kv, shape), 1e-5)


def test_pitfall_07_a_window_starts_where_each_row_of_a_node_says() -> None:
    layout = layout_of([(-1, 80), (0, 40)], [(1, 30), (0, 1), (1, 9)], items=[False, False, True])
    numbers = DecodeNumbers(dtype=torch.float32, window=33)
    decode = CodecDecode(SHAPE, DEVICE, numbers, 3, phase=Phase.PREFILL)
    kv = random_kv(layout, SHAPE, torch.float32, DEVICE)
    q = torch.randn((40, 4, 64), device=DEVICE)
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    assert_close(state, expected(layout, q, kv, SHAPE, window=33), 1e-5)


def test_pitfall_08_a_soft_cap_comes_before_the_mask() -> None:
    """Scores far above the cap: masked ones, capped, would weigh as much as the seen."""
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=1.0)
    layout = layout_of([(-1, 80), (0, 20), (0, 5)], [(1, 9), (2, 1), (0, 1)])
    decode = CodecDecode(
        shape, DEVICE, DecodeNumbers(dtype=torch.float32, soft_cap=2.0), 3, phase=Phase.PREFILL
    )
    kv = random_kv(layout, shape, torch.float32, DEVICE)
    q = torch.randn((11, 4, 64), device=DEVICE)
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    assert_close(state, expected(layout, q, kv, shape, cap=2.0), 1e-5)


@pytest.mark.parametrize("bins", [1, 8])
def test_pitfall_09_fp8_scales_are_applied_once_however_a_row_is_split(bins: int) -> None:
    layout = layout_of([(-1, 400), (0, 20)], [(1, 1), (0, 1)])
    kv = random_kv(layout, SHAPE, torch.float8_e4m3fn, DEVICE)
    q = torch.randn((2, 4, 64)).half().to(DEVICE)
    numbers = DecodeNumbers(dtype=torch.float16, k_scale=0.5, v_scale=3.0)
    decode = CodecDecode(SHAPE, DEVICE, numbers, bins)
    plan = decode.plan(layout)
    assert plan.merges == (bins > 1)
    state = run_poisoned(decode, plan, q, kv)
    scaled = kv._replace(k_pages=kv.k_pages.float() * 0.5, v_pages=kv.v_pages.float() * 3.0)
    assert_close(state, expected(layout, q, scaled, SHAPE), 1e-3)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_pitfall_10_head_dims_that_are_no_powers_of_two(dim: int, costs: CostTable) -> None:
    layout = decode_layout([Node(tokens=32), Node(parent=0, tokens=9)], [1, 0])
    check_all(layout, Phase.DECODE, costs, head_shape(4, 1, dim))
    check_all(items_over(20, [3, 5]), Phase.PREFILL, costs, head_shape(4, 1, dim))


@pytest.mark.parametrize("group", [3, 5, 6, 7])
def test_pitfall_11_groups_that_are_no_powers_of_two(group: int, costs: CostTable) -> None:
    shape = head_shape(2 * group, 2, 16)
    nodes = [Node(tokens=48), *[Node(parent=0, tokens=leaf + 1) for leaf in range(13)]]
    check_all(decode_layout(nodes, list(range(14))), Phase.DECODE, costs, shape)
    check_all(items_over(20, [3, 25, 1]), Phase.PREFILL, costs, shape)


def test_pitfall_12_offsets_beyond_32_bits() -> None:
    """Pages from 2^31 elements on; the memory before them is never touched."""
    shape = head_shape(4, 4, 64)
    page_elements = 16 * 4 * 64
    pages = 2**31 // page_elements + 8
    used = int32(range(pages - 8, pages))
    k = torch.empty((pages, 16, 4, 64), dtype=torch.float16, device=DEVICE)
    rows = torch.randn((7, 2, 4, 64)).half().to(DEVICE)
    k[pages - 8 :] = torch.randn((8, 16, 4, 64)).half().to(DEVICE)
    layout = AttentionLayout(
        page_size=16,
        node_parent=int32([-1, 0]),
        node_page_indptr=int32([0, 4, 8]),
        node_pages=used,
        node_tokens=int32([64, 50]),
        segment_indptr=int32([0, 1, 7]),
        segment_node=int32([1, 0]),
        segment_is_item=np.array([False, True]),
    )
    numbers = DecodeNumbers(dtype=torch.float16)
    decode = CodecDecode(shape, DEVICE, numbers, 3, phase=Phase.PREFILL)
    kv = LayerKV(k, k, rows[:, 0], rows[:, 1])
    q = torch.randn((7, 4, 64)).half().to(DEVICE)
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    assert_close(state, expected(layout, q, kv, shape), 1e-3)


FORESTS = {
    "siblings after a branched subtree": [-1, 0, 1, 1, 0, 4, 4, 4, 0],
    "binary, depth 4": [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6],
    "fan-out 5 twice": [-1, *[0] * 5, *[3] * 5],
    "several roots": [-1, 0, -1, 2, 2, -1],
    "one root": [-1],
    "more leaves than a tile holds": [-1, *[0] * 39],
}


@pytest.mark.parametrize("name", FORESTS)
def test_pitfall_13_forests_of_every_form(name: str, costs: CostTable) -> None:
    parents = FORESTS[name]
    inner = set(parents)
    nodes = [
        Node(parent=parent, tokens=16 if node in inner else 1 + node % 20)
        for node, parent in enumerate(parents)
    ]
    leaves = [node for node in range(len(nodes)) if node not in inner]
    check_all(decode_layout(nodes, leaves), Phase.DECODE, costs, head_shape(4, 1, 16))


def test_pitfall_14_the_splits_of_the_last_node_are_combined(costs: CostTable) -> None:
    check_all(decode_layout([Node(tokens=700)], [0]), Phase.DECODE, costs)
    two = [Node(tokens=16), Node(parent=0, tokens=700)]
    check_all(decode_layout(two, [1]), Phase.DECODE, costs)


def test_pitfall_15_one_long_request_among_short_ones(costs: CostTable) -> None:
    check_all(items_over(33, [1, 1, 90, 1, 2]), Phase.PREFILL, costs)
    nodes = [Node(tokens=600), *[Node(tokens=3)] * 6]
    check_all(decode_layout(nodes, list(range(7))), Phase.DECODE, costs)


def test_pitfall_16_nothing_of_an_older_plan_is_read() -> None:
    decode = CodecDecode(SHAPE, DEVICE, DecodeNumbers(dtype=torch.float32), 6)
    large: Nodes = [(-1, 320), (0, 160), (0, 77), (0, 5)]
    plan = decode.plan(layout_of(large, leaves_of(large)))
    for nodes in ([(-1, 16), (0, 1), (0, 2), (0, 3)], [(-1, 0), (0, 0), (0, 9), (-1, 130)]):
        layout = layout_of(nodes, leaves_of(nodes))
        if layout.num_rows != 3:
            layout = layout_of(nodes, [(1, 1), (2, 1), (3, 1)])
        assert decode.replan(plan, layout)
        kv = random_kv(layout, SHAPE, torch.float32, DEVICE)
        q = torch.randn((3, 4, 64), device=DEVICE)
        state = run_poisoned(decode, plan, q, kv)
        assert_close(state, expected(layout, q, kv, SHAPE), 1e-5)


def test_pitfall_17_a_run_that_was_cut_short_leaves_nothing_behind() -> None:
    """No semaphores, and no result depends on what is in the buffers before a run."""
    assert "atomic" not in inspect.getsource(kernels_triton)
    nodes: Nodes = [(-1, 320), *[(0, 40)] * 3]
    layout = layout_of(nodes, leaves_of(nodes))
    decode = CodecDecode(SHAPE, DEVICE, DecodeNumbers(dtype=torch.float32), 6)
    kv = random_kv(layout, SHAPE, torch.float32, DEVICE)
    q = torch.randn((3, 4, 64), device=DEVICE)
    plan = decode.plan(layout)
    first = decode.run(plan, q, kv)
    for left in (0.0, 1e30, torch.inf, torch.nan):
        plan.partial_out.fill_(left)
        plan.partial_lse.fill_(left)
        again = decode.run(plan, q, kv)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


def test_pitfall_18_fixed_splits_make_a_result_independent_of_the_batch() -> None:
    """More of this in test_codec_invariance; here, what a division of equal shares would not do."""
    tokens, shape = 64 * 9, head_shape(4, 1, 16)
    alone, others = layout_of([(-1, tokens)], [(0, 1)]), [(-1, 640 + 16 * n) for n in range(6)]
    together = layout_of([(-1, tokens), *others], [(n, 1) for n in range(7)])
    numbers = DecodeNumbers(dtype=torch.float32)
    splits: list[list[list[int]]] = []
    for division in (Division(), Division(fixed_split=128)):
        decode = CodecDecode(shape, DEVICE, numbers, 5, division=division)
        found: list[list[int]] = []
        for layout in (alone, together):
            host = decode.planner.plan(layout)
            mine = (host.pieces.low <= 0) & (host.pieces.high > 0)
            found.append(sorted(host.pieces.steps[mine].tolist()))
        splits.append(found)
    assert splits[0][0] != splits[0][1]
    assert splits[1][0] == splits[1][1] == [1, 2, 2, 2, 2]


def test_pitfall_19_the_same_node_twice_keeps_every_row(costs: CostTable) -> None:
    nodes = [Node(tokens=32), Node(parent=0, tokens=5), Node(parent=0, tokens=9)]
    layout = decode_layout(nodes, [2, 1, 2, 2, 1, 0, 0])
    check_all(layout, Phase.DECODE, costs)
    decode = CodecDecode(SHAPE, DEVICE, DecodeNumbers(dtype=torch.float32), 3)
    rows = decode.planner.plan(layout).streams.rows
    assert sorted(rows.tolist()) == list(range(7))
    check_all(items_over(20, [3, 3, 3]), Phase.PREFILL, costs)


def test_pitfall_20_a_backend_has_a_name_and_the_work_says_which_engine_runs(
    costs: CostTable,
) -> None:
    assert set(Backend) == {"fa2", "fa3"}  # no `auto`
    assert fa2_engine(int32([1]), 4, 128).startswith("fa2")
    layout = decode_layout([Node(tokens=32), Node(parent=0, tokens=5)], [1])
    for strategy in every_strategy(Phase.DECODE, SHAPE, costs):
        engines = {part.engine for part in strategy.work(layout).parts}
        expected_engine = "tree" if isinstance(strategy, CodecDecode) else "torch"
        assert expected_engine in engines
