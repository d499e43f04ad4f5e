"""The tree-decode kernels against attention in float64, on fresh inputs.

Without a GPU the same tests run in Triton's interpreter, at small sizes.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import (
    DEVICE,
    DIVISION,
    assert_close,
    check,
    expected,
    run_poisoned,
)
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, random_kv

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.codec.decode import PAGE_SIZES, CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.codec.host_tables import more_columns
from stemserve.kernels.codec.pieces import DEFAULT_DIVISION
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.strategy import Phase

TREES: dict[str, Nodes] = {
    "one token": [(-1, 1)],
    "two levels": [(-1, 96), (0, 20), (0, 33), (0, 16)],
    "empty inner nodes and leaves": [(-1, 64), (0, 0), (0, 0), (1, 0), (1, 7), (2, 0), (2, 40)],
    "one-token nodes": [(-1, 1), (0, 1), (0, 1), (1, 1), (1, 1), (2, 1)],
    "several roots": [(-1, 48), (-1, 5), (0, 17), (0, 1), (1, 30), (-1, 64)],
    "no sharing": [(-1, 70), (-1, 3), (-1, 128)],
    "three siblings below three": [(-1, 32), *[(0, 16)] * 3, *[(1 + n // 3, 9) for n in range(9)]],
    "a chain": [(-1, 32), (0, 16), (0, 32), (2, 16), (2, 32), (4, 3)],
}


@pytest.mark.parametrize("name", TREES)
def test_every_tree_equals_float64_attention(name: str) -> None:
    check(layout_of(TREES[name], leaves_of(TREES[name])), (8, 2, 64))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_dims_and_number_formats(dtype: torch.dtype, dim: int) -> None:
    nodes: Nodes = [(-1, 48), (0, 20), (0, 70)]
    check(layout_of(nodes, leaves_of(nodes)), (4, 1, dim), dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16, 64])
def test_groups_are_packed_densely(group: int) -> None:
    nodes: Nodes = [(-1, 64), *[(0, 1 + leaf % 3) for leaf in range(8)]]
    check(layout_of(nodes, leaves_of(nodes)), (2 * group, 2, 32))


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_page_sizes(page: int) -> None:
    nodes: Nodes = [(-1, 128), (0, 20), (0, 70), (0, 0)]
    check(layout_of(nodes, leaves_of(nodes), page), (4, 2, 64))


@pytest.mark.parametrize("bins", [1, 2, 16])
def test_the_division_does_not_change_the_result(bins: int) -> None:
    nodes: Nodes = [(-1, 200), *[(0, 30)] * 6]
    check(layout_of(nodes, leaves_of(nodes)), (4, 1, 64), torch.float32, bins)


def test_wide_nodes_of_several_tiles() -> None:
    nodes: Nodes = [(-1, 256), *[(0, 2)] * 20]
    check(layout_of(nodes, leaves_of(nodes)), (8, 1, 32), torch.float16, 12)


def test_siblings_do_not_see_each_other() -> None:
    """Scores are zero, values count the nodes: 0 -> 1 -> {2 -> 4, 3 -> 5}."""
    nodes: Nodes = [(-1, 1), (0, 1), (1, 1), (1, 1), (2, 1), (3, 1)]
    layout = layout_of(nodes, [(node, 1) for node in range(6)])
    shape = HeadShape(query_heads=1, kv_heads=1, head_dim=16, scale=1.0)
    kv = random_kv(layout, shape, torch.float32, DEVICE)
    for node, value in enumerate([0.0, 1.0, 4.0, 9.0, 16.0, 25.0]):
        kv.v_pages[layout.pages(node), 0] = value
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float32), 2)
    state = run_poisoned(decode, decode.plan(layout), torch.zeros((6, 1, 16), device=DEVICE), kv)
    found = state.out[:, 0, 0].cpu()
    torch.testing.assert_close(found, torch.tensor([0, 0.5, 5 / 3, 10 / 3, 5.25, 8.75]))


def test_rows_without_a_token_give_zero_and_minus_infinity() -> None:
    nodes: Nodes = [(-1, 0), (-1, 40), (0, 0)]
    check(layout_of(nodes, [(0, 1), (1, 1), (-1, 1), (2, 1), (1, 1)]), (4, 1, 64))


def test_segments_in_any_order_and_twice() -> None:
    nodes: Nodes = [(-1, 32), (0, 17), (0, 5), (-1, 16), (3, 9)]
    check(layout_of(nodes, [(4, 1), (2, 1), (1, 1), (4, 1), (0, 1), (2, 1)]), (8, 2, 64))


def test_a_soft_cap_bounds_the_scores() -> None:
    nodes: Nodes = [(-1, 80), (0, 20), (0, 5)]
    layout = layout_of(nodes, leaves_of(nodes))
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.5)
    kv = random_kv(layout, shape, torch.float32, DEVICE)
    q = torch.randn((2, 4, 64), device=DEVICE)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float32, soft_cap=3.0), 3)
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    assert_close(state, expected(layout, q, kv, shape, cap=3.0), 1e-5)


@pytest.mark.parametrize("window", [1, 20, 64, 500])
def test_a_window_hides_the_first_tokens(window: int) -> None:
    nodes: Nodes = [(-1, 80), (0, 20), (0, 5), (0, 48), (3, 37)]
    segments, items = [(1, 1), (4, 6), (2, 1), (2, 20), (0, 1)], [False, False, False, True, True]
    layout = layout_of(nodes, segments, items=items)
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    kv = random_kv(layout, shape, torch.float32, DEVICE)
    q = torch.randn((29, 4, 64), device=DEVICE)
    numbers = DecodeNumbers(dtype=torch.float32, window=window)
    decode = CodecDecode(shape, DEVICE, numbers, 3, phase=Phase.PREFILL)
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    assert_close(state, expected(layout, q, kv, shape, window=window), 1e-5)


def test_scaled_fp8_pages() -> None:
    nodes: Nodes = [(-1, 80), (0, 20), (0, 5)]
    layout = layout_of(nodes, leaves_of(nodes))
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    kv = random_kv(layout, shape, torch.float8_e4m3fn, DEVICE)
    q = torch.randn((2, 4, 64)).half().to(DEVICE)
    numbers = DecodeNumbers(dtype=torch.float16, k_scale=0.5, v_scale=0.25)
    decode = CodecDecode(shape, DEVICE, numbers, 3)
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    scaled = kv._replace(k_pages=kv.k_pages.float() * 0.5, v_pages=kv.v_pages.float() * 0.25)
    assert_close(state, expected(layout, q, scaled, shape), 1e-3)


@pytest.mark.parametrize("division", [DIVISION, Division(fixed_split=64)], ids=["even", "fixed"])
def test_a_plan_follows_leaves_that_grow_in_their_last_page(division: Division) -> None:
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float16), 4, division=division)
    first: Nodes = [(-1, 96), (0, 20), (0, 1), (-1, 33)]
    plan = decode.plan(layout_of(first, leaves_of(first)))
    for longer in ([(-1, 96), (0, 21), (0, 2), (-1, 34)], [(-1, 96), (0, 32), (0, 16), (-1, 40)]):
        layout = layout_of(longer, leaves_of(longer))
        kv = random_kv(layout, shape, torch.float16, DEVICE)
        q = torch.randn((3, 4, 64)).half().to(DEVICE)
        assert decode.grow(plan, layout)
        state = run_poisoned(decode, plan, q, kv)
        assert_close(state, expected(layout, q, kv, shape), 1e-3)
    new_page = layout_of([(-1, 96), (0, 33), (0, 16), (-1, 40)], leaves_of(first))
    assert not decode.grow(plan, new_page)
    with_item = layout_of(
        [(-1, 96), (0, 32), (0, 16), (-1, 40)], leaves_of(first), items=[True] * 3
    )
    assert not decode.grow(plan, with_item)


def test_another_layout_takes_over_a_plan() -> None:
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float16), 4)
    plan = decode.plan(layout_of([(-1, 160), (0, 60), (0, 50)], [(1, 1), (2, 1)]))
    layout = layout_of([(-1, 64), (0, 3), (-1, 100)], [(2, 1), (1, 1)])
    assert decode.replan(plan, layout)
    kv = random_kv(layout, shape, torch.float16, DEVICE)
    q = torch.randn((2, 4, 64)).half().to(DEVICE)
    state = run_poisoned(decode, plan, q, kv)
    assert_close(state, expected(layout, q, kv, shape), 1e-3)
    more_rows = layout_of([(-1, 64)], [(0, 1)] * 3)
    assert not decode.replan(plan, more_rows)


@pytest.mark.parametrize("heads", [(4, 2), (16, 8), (32, 8), (28, 4), (5, 1), (64, 4)], ids=str)
def test_every_merge_is_among_those_that_are_compiled_ahead(heads: tuple[int, int]) -> None:
    shape = HeadShape(query_heads=heads[0], kv_heads=heads[1], head_dim=64, scale=0.125)
    for division in (DEFAULT_DIVISION, replace(DEFAULT_DIVISION, parallel_reduction=False)):
        decode = CodecDecode(
            shape, DEVICE, DecodeNumbers(dtype=torch.float16), 4, division=division
        )
        ahead = decode.triton.merge_variants()
        for rows in (1, 2, 15, 31, 32, 33, 64, 65, 255, 256, 257, 5000):
            for columns in map(more_columns, range(1, 300)):
                assert decode.triton.merge_variant(rows, columns) in ahead


def test_compiling_merges_ahead_leaves_the_row_as_it_is() -> None:
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float16), 4)
    out = torch.full((1, 4, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    target = AttentionState(out, torch.full((1, 4), torch.nan, device=DEVICE))
    decode.triton.compile_merges(decode.partial(1), target)
    assert target.out.isnan().all() and target.lse.isnan().all()


def test_refusals_name_the_reason() -> None:
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float16), 4)
    prefill = CodecDecode(shape, DEVICE, decode.numbers, 4, phase=Phase.PREFILL)
    nodes: Nodes = [(-1, 64), (0, 3)]
    for strategy in (decode, prefill):
        assert "pages" in str(strategy.refusal(layout_of(nodes, [(1, 1)], page=4)))
    several, item = layout_of(nodes, [(1, 5)]), layout_of(nodes, [(1, 1)], items=[True])
    assert "not 5" in str(decode.refusal(several))
    assert "item segments" in str(decode.refusal(item))
    assert prefill.refusal(several) is None and prefill.refusal(item) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("fan_out", [1, 15, 64, 257, 1024])
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 32, 128), (16, 1, 128), (28, 4, 80)], ids=str)
def test_large_fans(heads: tuple[int, int, int], fan_out: int) -> None:
    nodes: Nodes = [(-1, 1500), *[(0, 1 + leaf % 40) for leaf in range(fan_out)]]
    check(layout_of(nodes, leaves_of(nodes)), heads, torch.float16, 0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_forests(dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes: Nodes = []
    for node in range(int(rng.integers(1, 200))):
        parent = int(rng.integers(-1, node)) if node else -1
        nodes.append((parent, int(rng.choice([0, 1, 16, 17, 100, 700]))))
    segments = [(int(node), 1) for node in rng.integers(-1, len(nodes), int(rng.integers(1, 300)))]
    check(layout_of(nodes, segments, rng=rng), (28, 4, 128), dtype, 0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_runs_are_identical_and_a_captured_graph_follows_its_plan() -> None:
    shape = HeadShape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float16))
    nodes: Nodes = [(-1, 4096), *[(0, 100)] * 40]
    layout = layout_of(nodes, leaves_of(nodes))
    kv = random_kv(layout, shape, torch.float16, DEVICE)
    q = torch.randn((40, 32, 128)).half().to(DEVICE)
    plan = decode.plan(layout)
    first = run_poisoned(decode, plan, q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = decode.run(plan, q, kv)
    graph.replay()
    assert torch.equal(state.out, first.out) and torch.equal(state.lse, first.lse)
    other = layout_of([(-1, 4000), *[(0, 70 + leaf) for leaf in range(40)]], leaves_of(nodes))
    assert decode.replan(plan, other)
    kv_other = random_kv(other, shape, torch.float16, DEVICE)
    assert len(kv_other.k_pages) <= len(kv.k_pages)
    kv.k_pages[: len(kv_other.k_pages)].copy_(kv_other.k_pages)
    kv.v_pages[: len(kv_other.v_pages)].copy_(kv_other.v_pages)
    graph.replay()
    assert_close(state, expected(other, q, kv, shape), 1e-3)
