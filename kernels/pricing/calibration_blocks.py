"""Measure blocks of the torch path: C_est over a grid of rows and tokens, and what a call costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, int32
from stemserve.kernels.pricing.engine_cost import BlockEngine
from stemserve.kernels.pricing.stopwatch import Bench
from stemserve.kernels.torch_paths.block_attention import attend
from stemserve.kernels.torch_paths.naive import NaiveAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    kv_tokens: tuple[int, ...] = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
    passes: int = 3  # over the grid: what disturbs the machine lasts longer than a point

    @property
    def points(self) -> int:
        return self.passes * len(self.rows) * len(self.kv_tokens)


# Small blocks are measured many to a call: pairs of (row, token) that a call should have at least.
BATCH_PAIRS = 1 << 16
MAX_BATCH_BYTES = 128 << 20  # of the keys and values of a call
MAX_BLOCKS = 256
MIN_POINT_SECONDS = 0.02
MIN_REPEATS = 2
LAUNCH_SEGMENTS = 32
CAUSAL_TILE_ROWS = 32  # of torch's flash attention on a CPU, where blocks are short


def measure_blocks(bench: Bench, grid: Grid, progress: Callable[[], None]) -> BlockEngine:
    """Calls `progress` before each of the grid's points. The inputs are random numbers."""
    points = list(product(range(len(grid.rows)), range(len(grid.kv_tokens))))
    seconds = np.full((len(grid.rows), len(grid.kv_tokens)), np.inf)
    launch_s = np.inf
    for _ in range(grid.passes):
        launch_s = min(launch_s, measure_launch(bench))
        for i, j in points:
            progress()
            measured = measure_block(bench, grid.rows[i], grid.kv_tokens[j])
            seconds[i, j] = min(seconds[i, j], measured)
    return BlockEngine(
        launch_seconds=four_digits(launch_s),
        # On a GPU all of a causal block is computed.
        tile_rows=CAUSAL_TILE_ROWS if bench.device.type == "cpu" else grid.rows[-1],
        rows=grid.rows,
        kv_tokens=grid.kv_tokens,
        seconds=tuple(tuple(map(four_digits, line)) for line in seconds.tolist()),
    )


def four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def measure_block(bench: Bench, rows: int, tokens: int) -> float:
    """Seconds of a block, as one of so many that the cost of the call is nothing beside them."""
    shape = bench.shape
    token_bytes = 2 * shape.kv_heads * shape.head_dim * bench.dtype.itemsize
    fitting = MAX_BATCH_BYTES // (tokens * token_bytes)
    blocks = max(1, min(BATCH_PAIRS // (rows * tokens), fitting, MAX_BLOCKS))
    q = bench.random(blocks, rows, shape.query_heads, shape.head_dim)
    k = bench.random(blocks, tokens, shape.kv_heads, shape.head_dim)
    v = bench.random(blocks, tokens, shape.kv_heads, shape.head_dim)
    return _best_seconds(bench, lambda: attend(q, k, v, shape)) / blocks


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
    slots = bench.random(LAUNCH_SEGMENTS, 1, shape.kv_heads, shape.head_dim)
    kv = LayerKV(slots, slots, slots[:, 0], slots[:, 0])
    q = bench.random(LAUNCH_SEGMENTS, shape.query_heads, shape.head_dim)
    naive = NaiveAttention(shape, bench.device)
    plan = naive.plan(layout)
    return _best_seconds(bench, lambda: naive.run(plan, q, kv)) / plan.work.launches


def _best_seconds(bench: Bench, call: Callable[[], object]) -> float:
    """The least of several: what disturbs a measurement only ever adds to it."""
    call()
    best, spent, repeats = np.inf, 0.0, 0
    while spent < MIN_POINT_SECONDS or repeats < MIN_REPEATS:
        bench.wait()
        start = time.perf_counter()
        call()
        bench.wait()
        seconds = time.perf_counter() - start
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return best
