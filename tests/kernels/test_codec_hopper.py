"""The Hopper kernel of tree decode against attention in float64, emulated and on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.kernels.codec_checks import DEVICE, ERROR, assert_close, expected, run_poisoned
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, levels, random_kv
from tests.kernels.emulated_hopper import check, emulated

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.hopper import (
    hopper_takes,
)
from stemserve.kernels.codec.pairs import (
    SHARED,
    STEPS,
)
from stemserve.kernels.layout import AttentionLayout, HeadShape

HEADS = HeadShape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
on_hopper = pytest.mark.skipif(
    not hopper_takes(HEADS, torch.float16, DEVICE), reason="needs a Hopper GPU"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hopper")


TREES: dict[str, tuple[Nodes, tuple[int, int], int]] = {
    "two levels": ([(-1, 96), (0, 20), (0, 33), (0, 16)], (8, 2), 3),
    "no rows below some nodes": ([(-1, 64), (0, 0), (0, 0), (1, 0), (1, 7), (2, 40)], (4, 1), 3),
    "several roots": ([(-1, 48), (-1, 5), (0, 17), (0, 1), (1, 30), (-1, 64)], (6, 2), 2),
    "a group of 7": ([(-1, 100), *[(0, 3 + leaf) for leaf in range(12)]], (7, 1), 4),
    "a group of 1": ([(-1, 70), (0, 3), (0, 128)], (3, 3), 2),
}


@emulated
@pytest.mark.parametrize("name", TREES)
def test_trees_equal_float64_attention(folder: Path, name: str) -> None:
    nodes, (query_heads, kv_heads), bins = TREES[name]
    check(folder, layout_of(nodes, leaves_of(nodes)), (query_heads, kv_heads, 128), bins)


@emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [700, 1500])
def test_wide_nodes_are_loaded_once_for_two_tiles(
    folder: Path, dtype: torch.dtype, tokens: int
) -> None:
    """An even and an odd number of steps, and parts that come after other pieces."""
    nodes: Nodes = [(-1, tokens), *[(0, 30)] * 20]
    dim = 128 if dtype == torch.float16 else 64
    host = check(folder, layout_of(nodes, leaves_of(nodes)), (4, 1, dim), 4, dtype)
    assert host.streams.num_wide == 1
    assert (host.records[:, SHARED] % 2 == 1).any() or tokens != 700
    assert (host.records[:4, SHARED] == 0).any() and (host.records[4:, SHARED] > 0).any()


@emulated
def test_tiles_that_begin_alike_share_their_first_steps(folder: Path) -> None:
    nodes = levels([1, 2, 4, 64], [300, 40, 16, 20])
    host = check(folder, layout_of(nodes, leaves_of(nodes)), (4, 1, 128), 4)
    shared, steps = host.records[:, SHARED], host.records[:, STEPS]
    assert host.streams.num_wide == 0
    assert ((shared > 0) & (shared < steps)).any()


@emulated
@pytest.mark.parametrize("grown", [1, 7, 19])
def test_pages_that_tokens_will_come_into(folder: Path, grown: int) -> None:
    nodes: Nodes = [(-1, 700), *[(0, 20 + leaf) for leaf in range(20)]]
    check(folder, layout_of(nodes, leaves_of(nodes)), (4, 1, 128), 4, grown=grown)


@emulated
def test_segments_of_several_rows(folder: Path) -> None:
    nodes: Nodes = [(-1, 48), (0, 20), (0, 5), (-1, 37)]
    check(folder, layout_of(nodes, [(1, 18), (2, 5), (3, 1)]), (8, 2, 128), 3)


@emulated
@pytest.mark.parametrize("seed", range(3))
def test_random_forests(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes: Nodes = []
    for node in range(int(rng.integers(1, 20))):
        parent = int(rng.integers(-1, node)) if node else -1
        nodes.append((parent, int(rng.choice([0, 1, 16, 17, 100]))))
    segments = [(int(node), 1) for node in rng.integers(-1, len(nodes), int(rng.integers(1, 50)))]
    check(folder, layout_of(nodes, segments, rng=rng), (4, 1, 64), 5)


def on_gpu(layout: AttentionLayout, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=dtype), hopper=True)
    assert decode.hopper is not None
    kv = random_kv(layout, shape, dtype, DEVICE)
    fused = torch.randn((layout.num_rows, query_heads + 2 * kv_heads, dim)).to(dtype).to(DEVICE)
    q = fused[:, :query_heads]
    plan = decode.plan(layout)
    plan.on_hopper = True  # however short the pieces are
    state = run_poisoned(decode, plan, q, kv)
    assert_close(state, expected(layout, q, kv, shape), ERROR[dtype])
    again = run_poisoned(decode, plan, q, kv)
    assert torch.equal(state.out, again.out) and torch.equal(state.lse, again.lse)
    plan.merges = True  # the other depth of the rings, unless the plan merges
    shallow = run_poisoned(decode, plan, q, kv)
    assert torch.equal(state.out, shallow.out) and torch.equal(state.lse, shallow.lse)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("fan_out", [1, 15, 40, 257])
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 64), (16, 1, 128)], ids=str)
def test_fans_on_a_gpu(heads: tuple[int, int, int], fan_out: int) -> None:
    nodes: Nodes = [(-1, 9000), *[(0, 1 + leaf % 40) for leaf in range(fan_out)]]
    on_gpu(layout_of(nodes, leaves_of(nodes)), heads, torch.float16)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_forests_on_a_gpu(dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes: Nodes = []
    for node in range(int(rng.integers(1, 200))):
        parent = int(rng.integers(-1, node)) if node else -1
        nodes.append((parent, int(rng.choice([0, 1, 16, 17, 100, 700]))))
    segments = [(int(node), 1) for node in rng.integers(-1, len(nodes), int(rng.integers(1, 300)))]
    on_gpu(layout_of(nodes, segments, rng=rng), (28, 4, 128), dtype)


@pytest.mark.gpu
@on_hopper
def test_several_rows_a_segment_on_a_gpu() -> None:
    nodes: Nodes = [(-1, 48), (0, 20), (0, 5), (-1, 37)]
    on_gpu(layout_of(nodes, [(1, 18), (2, 5), (3, 1)]), (8, 2, 128), torch.float16)
