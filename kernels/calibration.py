"""Measure a cost table on the device at hand."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.block_attention import attend
from stemserve.kernels.cost_model import FORMAT_VERSION, CostTable
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.naive import NaiveAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    kv_tokens: tuple[int, ...] = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)


FULL_GRID = Grid()

# Small blocks are measured many to a call: pairs of (row, token) that a call should have at least.
BATCH_PAIRS = 1 << 16
MAX_BATCH_BYTES = 128 << 20  # of the keys and values of a call
MAX_BLOCKS = 256
PASSES = 3  # over the whole grid: what disturbs the machine lasts longer than a point
MIN_POINT_SECONDS = 0.02
MIN_REPEATS = 2
LAUNCH_SEGMENTS = 32

Progress = Callable[[int, int], None]  # measurements done, measurements in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    shape: HeadShape
    device: torch.device
    dtype: torch.dtype

    def tensor(self, *size: int) -> Tensor:
        return torch.ones(*size, dtype=self.dtype, device=self.device)

    def best_seconds(self, call: Callable[[], object]) -> float:
        """The least of several: what disturbs a measurement only ever adds to it."""
        call()
        best, spent, repeats = np.inf, 0.0, 0
        while spent < MIN_POINT_SECONDS or repeats < MIN_REPEATS:
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            seconds = time.perf_counter() - start
            best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_cost_table(
    shape: HeadShape,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    grid: Grid = FULL_GRID,
) -> CostTable:
    """About 15 s on one thread of a CPU for 9 query heads of 64."""
    bench = Bench(shape=shape, device=device, dtype=dtype)
    points = list(product(range(len(grid.rows)), range(len(grid.kv_tokens))))
    seconds = np.full((len(grid.rows), len(grid.kv_tokens)), np.inf)
    launch_s = np.inf
    for run in range(PASSES):
        launch_s = min(launch_s, measure_launch(bench))
        for done, (i, j) in enumerate(points):
            progress(run * len(points) + done, PASSES * len(points))
            measured = measure_block(bench, grid.rows[i], grid.kv_tokens[j])
            seconds[i, j] = min(seconds[i, j], measured)
    progress(PASSES * len(points), PASSES * len(points))
    return CostTable(
        format_version=FORMAT_VERSION,
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        libraries={"torch": str(torch.__version__)},
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        launch_seconds=_four_digits(launch_s),
        rows=grid.rows,
        kv_tokens=grid.kv_tokens,
        seconds=tuple(tuple(map(_four_digits, line)) for line in seconds.tolist()),
    )


def _four_digits(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def device_name(device: torch.device) -> str:
    """As the shipped tables are named: cpu, nvidia-h200."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def measure_block(bench: Bench, rows: int, tokens: int) -> float:
    """Seconds of a block, as one of so many that the cost of the call is nothing beside them."""
    shape = bench.shape
    token_bytes = 2 * shape.kv_heads * shape.head_dim * bench.dtype.itemsize
    fitting = MAX_BATCH_BYTES // (tokens * token_bytes)
    blocks = max(1, min(BATCH_PAIRS // (rows * tokens), fitting, MAX_BLOCKS))
    q = bench.tensor(blocks, rows, shape.query_heads, shape.head_dim)
    k = bench.tensor(blocks, tokens, shape.kv_heads, shape.head_dim)
    v = bench.tensor(blocks, tokens, shape.kv_heads, shape.head_dim)
    return bench.best_seconds(lambda: attend(q, k, v, shape)) / blocks


def measure_launch(bench: Bench) -> float:
    """Seconds of a call in a plan of many that have next to nothing to compute."""
    shape = bench.shape
    segments = np.arange(LAUNCH_SEGMENTS, dtype=np.int32)
    layout = AttentionLayout(
        page_size=1,
        node_parent=np.full_like(segments, -1),
        node_page_indptr=int32(np.arange(LAUNCH_SEGMENTS + 1)),
        node_pages=segments,
        node_tokens=np.ones_like(segments),
        segment_indptr=int32(np.arange(LAUNCH_SEGMENTS + 1)),
        segment_node=segments,
        segment_is_item=np.zeros(LAUNCH_SEGMENTS, np.bool_),
    )
    slots = bench.tensor(LAUNCH_SEGMENTS, 1, shape.kv_heads, shape.head_dim)
    kv = LayerKV(slots, slots, slots[:, 0], slots[:, 0])
    q = bench.tensor(LAUNCH_SEGMENTS, shape.query_heads, shape.head_dim)
    naive = NaiveAttention(shape, bench.device)
    plan = naive.plan(layout)
    return bench.best_seconds(lambda: naive.run(plan, q, kv)) / plan.work.launches
