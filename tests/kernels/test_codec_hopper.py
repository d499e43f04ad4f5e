"""The Hopper kernel of tree decode against attention in float64.

Without a GPU its source runs on a CPU, with the functions of hopper.cuh emulated: every thread of
every block, with all that they wait for. A run in which nobody can go on fails.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import DEVICE, ERROR, assert_close, expected, run_poisoned
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, levels, random_kv
from tests.kernels.test_codec_tiles import random_forest

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.codec_decode import LOG2E, CodecDecode, DecodeNumbers
from stemserve.kernels.codec_division import Division, PieceCosts
from stemserve.kernels.codec_growth import leaf_growth
from stemserve.kernels.codec_hopper import (
    FILES,
    OFFSETS,
    HopperTree,
    constants,
    hopper_takes,
)
from stemserve.kernels.codec_host_tables import HostTables
from stemserve.kernels.codec_native import NativePlanner
from stemserve.kernels.codec_pairs import (
    NEXT,
    OTHER_BASE,
    SHARED,
    STEPS,
    Pairing,
)
from stemserve.kernels.codec_planner import Planner, numpy_paired
from stemserve.kernels.codec_tables import DeviceTables
from stemserve.kernels.cuda_program import SOURCES, TensorMap
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape

HERE = Path(__file__).parent
HEADS = HeadShape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
on_hopper = pytest.mark.skipif(
    not hopper_takes(HEADS, torch.float16, DEVICE), reason="needs a Hopper GPU"
)
emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class EmulatedKernel:
    """Takes the place of `CudaKernel`; a tensor's address, sizes and strides that of its map."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run_tree_kernel
        self._run.restype = ctypes.c_bool
        self._run.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3]

    def tensor_map(self, tensor: torch.Tensor, box: Sequence[int]) -> TensorMap:
        assert tuple(box) == (64, 1, 16, 1)
        sizes, strides = reversed(tensor.shape), reversed(tensor.stride())
        numbers = (ctypes.c_int64 * 9)(tensor.data_ptr(), *sizes, *strides)
        return (ctypes.c_char * 72).from_buffer(numbers)

    def launch(self, blocks: int, threads: int, addresses: Sequence[int]) -> None:
        assert threads == 384 and len(addresses) == 2 + len(OFFSETS)
        assert self._run(blocks, *addresses[:3]), "the threads wait for each other"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hopper")


def library(folder: Path, dim: int, dtype: torch.dtype) -> ctypes.CDLL:
    path = folder / f"kernel-{dim}-{dtype}.so"
    if not path.exists():
        source = folder / "kernel.cpp"
        parts = [HERE / "hopper_emulation.h", *(SOURCES / file for file in FILES[1:])]
        parts.append(HERE / "hopper_emulation.cpp")
        source.write_text("".join(part.read_text() for part in parts))
        macros = [f"-D{name}={value}" for name, value in constants(dim, dtype).items()]
        flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w"]
        subprocess.run(["g++", *flags, *macros, "-o", path, source], check=True)
    return ctypes.CDLL(str(path))


def plan_of(layout: AttentionLayout, group: int, bins: int) -> HostTables:
    """Paired however little is shared."""
    always = Pairing(least_share=0.0, least_steps=0)
    return NativePlanner(group, bins, 0, PieceCosts(), Division(), always).plan(layout)


def merge(host: HostTables, partial: AttentionState, state: AttentionState) -> None:
    """The rows that have partial results, in the layout's order."""
    group = state.out.shape[1] // len(partial.out)
    for row, count in enumerate(host.pieces.merge_count.tolist()):
        if count < 0:
            continue
        to = int(host.streams.rows[row])
        for head in range(state.out.shape[1]):
            at = host.pieces.merge[row, :count].astype(np.int64) + head % group
            parts = partial.out[head // group][at].double()
            logs = partial.lse[head // group][at].double() / LOG2E
            total = logs.logsumexp(0)
            state.lse[to, head] = total
            state.out[to, head] = ((logs - total).exp()[:, None] * parts).sum(0) if count else 0


def check(
    folder: Path,
    layout: AttentionLayout,
    heads: tuple[int, int, int],
    bins: int,
    dtype: torch.dtype = torch.float16,
    grown: int = 0,
) -> HostTables:
    """`grown`: tokens that every leaf lacks, in a plan made with them."""
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    host = plan_of(layout, shape.group, bins)
    tables = DeviceTables.make(host, torch.device("cpu"))
    if grown:
        last = layout.node_tokens[layout.segment_node]
        growth = leaf_growth(host, tables.capacity, np.stack([last - grown, last]))
        tables.buffer[index_tensor(growth.places, tables.buffer.device)] = device_tensor(
            growth.values[0], tables.buffer.device
        )
        node_tokens = layout.node_tokens.copy()
        node_tokens[layout.segment_node] -= grown
        layout = replace(layout, node_tokens=node_tokens)
    kv = random_kv(layout, shape, dtype, torch.device("cpu"))
    fused = torch.randn((layout.num_rows, query_heads + 2 * kv_heads, dim)).to(dtype)
    q = fused[:, :query_heads]
    size = (kv_heads, max(1, tables.capacity.partial_rows))
    part_dtype = torch.float16 if dtype == torch.float16 else torch.float32
    partial = AttentionState(
        torch.full((*size, dim), torch.nan, dtype=part_dtype), torch.full(size, torch.nan)
    )
    state = AttentionState(
        torch.full(q.shape, torch.nan, dtype=dtype), torch.full(q.shape[:2], torch.nan)
    )
    scales = (shape.scale * LOG2E, 1.0)
    kernel = EmulatedKernel(library(folder, dim, dtype))
    tree = HopperTree(shape=shape, bins=bins, kernel=kernel, scales=scales)
    assert tree.takes(tables, q, kv)
    tree.read_tree(tables, partial, q, kv, state)
    merge(host, partial, state)
    assert_close(state, expected(layout, q, kv, shape), ERROR[dtype])
    return host


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


@pytest.mark.parametrize(
    "widths",
    [([1, 64], [8192, 256]), ([1, 50], [20000, 200]), ([1, 4, 16, 512], [1024, 256, 128, 32])],
    ids=str,
)
def test_partners_agree_on_what_they_share(widths: tuple[list[int], list[int]]) -> None:
    """And on how many stages each ring holds before."""
    nodes, bins = levels(*widths), 33
    host = plan_of(layout_of(nodes, leaves_of(nodes)), 4, bins)
    records = host.records
    words = host.streams.words.reshape(-1, 4)
    read = 0
    for first in range(0, bins - 1, 2):
        shares: list[list[tuple[int, ...]]] = []
        for head in (first, first + 1):
            base, at, found = 0, head, list[tuple[int, ...]]()
            while at >= 0:
                steps, start, shared = (int(n) for n in records[at, [STEPS, 3, SHARED]])
                if shared:
                    found.append((base, int(records[at, OTHER_BASE]), shared, start))
                base += steps - shared + (shared + 1) // 2
                read += steps
                at = int(records[at, NEXT])
            shares.append(found)
        assert len(shares[0]) == len(shares[1])
        for one, other in zip(*shares, strict=True):
            assert one[:2] == other[1::-1] and one[2] == other[2]
            of_one, of_other = (words[start : start + one[2]] for start in (one[3], other[3]))
            assert np.array_equal(of_one, of_other)
    assert not records[bins - 1, SHARED]
    assert read + int(records[bins - 1, STEPS]) == host.pieces.steps.sum()
    assert records[:, SHARED].any()


@pytest.mark.parametrize("seed", range(40))
def test_the_planner_in_c_pairs_bins_alike(seed: int) -> None:
    rng = np.random.default_rng([seed, 5])
    bins, group, wide = (
        int(rng.integers(1, 70)),
        int(rng.choice([1, 4, 7])),
        int(rng.choice([9, 48])),
    )
    nodes = levels([1, 8, int(rng.integers(20, 200))], [int(n) for n in rng.integers(0, 5000, 3)])
    if seed % 2:
        nodes = random_forest(rng, int(rng.integers(1, 200)))
    layout = layout_of(nodes, leaves_of(nodes))
    for pairing in (Pairing(wide=wide, least_share=0.0, least_steps=0), Pairing(wide=wide)):
        native = NativePlanner(group, bins, 0, PieceCosts(), Division(), pairing)
        expected = numpy_paired(layout, group, bins, PieceCosts(), Division(), pairing)
        for _ in range(2):  # the second time in the memory of the first
            found = native.plan(layout)
            assert found.paired == expected.paired and found.size == expected.size
            assert np.array_equal(found.records, expected.records)
            assert np.array_equal(found.pieces.steps, expected.pieces.steps)


@pytest.mark.parametrize(
    ("widths", "paired"),
    [
        (([1, 64], [8192, 256]), True),
        (([1, 16, 32, 64, 256, 1024], [256, 128, 64, 16, 16, 16]), True),
        (([1, 128], [8192, 2048]), False),
        (([1, 16], [51200, 512]), False),
    ],
    ids=str,
)
def test_plans_that_share_little_are_made_for_the_triton_kernel(
    widths: tuple[list[int], list[int]], paired: bool
) -> None:
    nodes = levels(*widths)
    layout = layout_of(nodes, leaves_of(nodes))
    pairing, plain = (
        Planner(
            group=4, bins=33, window=0, costs=PieceCosts(), division=Division(), pairing=pairing
        ).plan(layout)
        for pairing in (Pairing(), None)
    )
    assert pairing.paired == paired and not plain.paired
    assert np.array_equal(pairing.records, plain.records) or paired


def on_gpu(layout: AttentionLayout, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=dtype), hopper=True)
    assert decode.hopper is not None
    kv = random_kv(layout, shape, dtype, DEVICE)
    fused = torch.randn((layout.num_rows, query_heads + 2 * kv_heads, dim)).to(dtype).to(DEVICE)
    q = fused[:, :query_heads]
    plan = decode.plan(layout)
    plan.on_hopper = True  # however little is shared
    state = run_poisoned(decode, plan, q, kv)
    assert_close(state, expected(layout, q, kv, shape), ERROR[dtype])
    again = run_poisoned(decode, plan, q, kv)
    assert torch.equal(state.out, again.out) and torch.equal(state.lse, again.lse)


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
