"""Runs of the Hopper kernel's source on a CPU, with the functions of hopper.cuh emulated.

Every thread of every block runs, with all that they wait for. A run in which nobody can go on
fails.
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
from tests.kernels.codec_checks import ERROR, assert_close, expected
from tests.kernels.codec_forests import random_kv

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.codec.decode import LOG2E
from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.growth import leaf_growth
from stemserve.kernels.codec.hopper import (
    DEEP,
    FILES,
    OFFSETS,
    SHALLOW,
    HopperTree,
    Rings,
    constants,
)
from stemserve.kernels.codec.host_tables import HostTables
from stemserve.kernels.codec.native import NativePlanner
from stemserve.kernels.codec.pairs import Pairing
from stemserve.kernels.codec.tables import DeviceTables
from stemserve.kernels.cuda_program import SOURCES, TensorMap
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape

HERE = Path(__file__).parent
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


def library(folder: Path, dim: int, dtype: torch.dtype, rings: Rings) -> ctypes.CDLL:
    path = folder / f"kernel-{dim}-{dtype}-{rings.keys}.so"
    if not path.exists():
        source = folder / "kernel.cpp"
        parts = [HERE / "hopper_emulation.h", *(SOURCES / file for file in FILES[1:])]
        parts.append(HERE / "hopper_emulation.cpp")
        source.write_text("".join(part.read_text() for part in parts))
        macros = [f"-D{name}={value}" for name, value in constants(dim, dtype, rings).items()]
        flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w"]
        subprocess.run(["g++", *flags, *macros, "-o", path, source], check=True)
    return ctypes.CDLL(str(path))


def plan_of(layout: AttentionLayout, group: int, bins: int) -> HostTables:
    """Paired however short the pieces are."""
    always = Pairing(least_steps=0)
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
    shallow, deep = (EmulatedKernel(library(folder, dim, dtype, r)) for r in (SHALLOW, DEEP))
    tree = HopperTree(shape=shape, bins=bins, shallow=shallow, deep=deep, scales=scales)
    assert tree.takes(tables, q, kv)
    results: list[AttentionState] = []
    for merges in (True, False):  # both depths of the rings, whatever the plan
        tree.read_tree(tables, partial, q, kv, state, merges=merges)
        merge(host, partial, state)
        assert_close(state, expected(layout, q, kv, shape), ERROR[dtype])
        results.append(AttentionState(state.out.clone(), state.lse.clone()))
        for poisoned in (state.out, state.lse, partial.out, partial.lse):
            poisoned.fill_(torch.nan)
    assert torch.equal(results[0].out, results[1].out)
    assert torch.equal(results[0].lse, results[1].lse)
    return host
