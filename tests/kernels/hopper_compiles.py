"""Compiles for an H200 what launches of our kernels ask for, on a host without a GPU.

A process of its own: Triton's interpreter, which other tests use, is chosen when it is imported.
Prints as JSON how many programs each kernel was compiled to: `python hopper_compiles.py variants`
only counts them, for steps of many sizes; `start` compiles what a worker compiles when it starts.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.flashinfer_paths.level_merge import LevelMerge, LevelParts
from stemserve.kernels.fused.burst import (
    RESULTS,
    BurstRows,
    BurstShape,
    StepDraws,
    advance,
    record,
)
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.merge import RowMerge
from stemserve.kernels.page_gather import TokenCopy
from stemserve.kernels.sampling.draw import draw_tokens
from stemserve.kernels.sampling.slot_tables import SlotTables

HEADS = HeadShape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
BF16, CPU = torch.bfloat16, torch.device("cpu")
VOCAB = 151_936  # 1,187 blocks of 128: an odd number, so that parts of an array start anywhere
BINS = 132 * 2 // 8
SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 33)

found: dict[str, set[Any]] = defaultdict(set)


class NoDriver:
    """As much of a driver as compilation asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """Compiles, and launches nothing."""

    kernel: Any
    grid: Any

    def __call__(self, *args: Any, **options: Any) -> None:
        # Host code takes the tensors for those of a CPU.
        on_gpu = {"WIDEN": False, "OVERLAP": True}
        options |= {name: value for name, value in on_gpu.items() if name in options}
        if "OVERLAP" in options:
            options["launch_pdl"] = True
        self.kernel.warmup(*args, grid=self.grid, **options)


def begin(*, only_count: bool) -> None:
    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        found[fn.name].add(str(key))
        return only_count

    def compile_only(kernel: Any, grid: Any) -> Launch:
        return Launch(kernel, grid)

    runtime: Any = import_module("triton.knobs").runtime
    runtime.jit_cache_hook = note
    active: Any = driver
    active.set_active(NoDriver())
    functions: Any = JITFunction
    functions.__getitem__ = compile_only


def rows_of_heads(rows: int, heads: int = HEADS.query_heads) -> torch.Tensor:
    return torch.zeros(rows, heads, HEADS.head_dim, dtype=BF16)


def copies_and_merges(size: int) -> None:
    sources = torch.zeros(size, dtype=torch.int32)
    pages = torch.zeros(4, 16, HEADS.kv_heads, HEADS.head_dim, dtype=BF16)
    rows, copies = rows_of_heads(4, HEADS.kv_heads), rows_of_heads(size, HEADS.kv_heads)
    TokenCopy(sources, copies, copies.clone()).run(LayerKV(pages, pages, rows, rows))
    state = AttentionState(rows_of_heads(8), torch.zeros(8, HEADS.query_heads))
    parts = torch.zeros(4, 1 + size, dtype=torch.int32)
    RowMerge(HEADS, parts, torch.zeros(4, dtype=torch.int32)).run(state, state)
    merge = LevelMerge(2, sources, sources, HEADS.query_heads, HEADS.head_dim)
    merge.run(LevelParts.empty(2, rows_of_heads(size)))


def draws(size: int) -> None:
    slots = torch.zeros(size, dtype=torch.int64)
    draw_tokens(torch.zeros(size, VOCAB), SlotTables(40, CPU), slots, slots.clone())


def bursts(size: int) -> None:
    shape = BurstShape(rows=size, steps=8, growth=100)
    rows = BurstRows.empty(size, CPU)
    inputs = torch.zeros(shape.tables_at + 64, dtype=torch.int32)
    last_token = torch.zeros(41, dtype=torch.int64)
    advance(inputs, shape, last_token, rows)
    draws = StepDraws(torch.zeros(size, dtype=torch.int64), torch.zeros(size))
    results = torch.zeros(shape.steps, RESULTS, size, dtype=torch.int32)
    record(inputs, draws, rows.sample_slots, last_token, results, VOCAB)


def decode() -> None:
    """The tree kernel of eager steps, and all merges."""
    codec = CodecDecode(HEADS, CPU, DecodeNumbers(dtype=BF16), BINS, hopper=False)
    layout = AttentionLayout(
        page_size=16,
        node_parent=int32([-1]),
        node_page_indptr=int32([0, 1]),
        node_pages=int32([0]),
        node_tokens=int32([9]),
        segment_indptr=int32([0, 1, 2]),
        segment_node=int32([0, 0]),
        segment_is_item=int32([0, 0]).astype(bool),
    )
    target = AttentionState(rows_of_heads(2), torch.zeros(2, HEADS.query_heads))
    pages = torch.zeros(4, 16, HEADS.kv_heads, HEADS.head_dim, dtype=BF16)
    own = rows_of_heads(2, HEADS.kv_heads)
    plan = codec.plan(layout)
    kv = LayerKV(pages, pages.clone(), own, own.clone())
    codec.triton.read_tree(plan.tables, plan.partial, rows_of_heads(2), kv, target)
    codec.triton.compile_merges(codec.partial(1), target)


def dense() -> None:
    from stemserve.kernels.dense.launch import DenseLauncher, DeviceTiles, Sources

    def properties(_: Any) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=132)

    cuda: Any = torch.cuda
    cuda.get_device_properties = properties
    tables = [torch.zeros(size, dtype=torch.int32) for size in ((132, 2, 8), 40, 64, 64)]
    tiles = DeviceTiles(items=tables[0], blocks=tables[1], row_first=tables[2], row_seen=tables[3])
    own = [rows_of_heads(64, HEADS.kv_heads) for _ in range(4)]
    target = AttentionState(rows_of_heads(64), torch.zeros(64, HEADS.query_heads))
    launcher = DenseLauncher(HEADS, CPU)
    launcher.launch(tiles, Sources(rows_of_heads(64), *own).matrices(), target)


def main(what: str) -> None:
    begin(only_count=what == "variants")
    if what == "variants":
        for size in SIZES:
            copies_and_merges(size)
            draws(size)
            bursts(size)
    else:
        starts: tuple[Callable[[], None], ...] = (
            decode,
            dense,
            lambda: copies_and_merges(3),
            lambda: draws(4),
            lambda: bursts(4),
        )
        for start in starts:
            start()
    print(json.dumps({name: len(keys) for name, keys in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
