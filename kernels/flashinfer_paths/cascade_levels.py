"""The levels of a decode forest as batches: each run of shared tokens is a request of its rows."""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.flashinfer_paths.prefill_batch import PrefillBatch
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.prefix_forest import PrefixRun, prefix_forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    row_start: int  # in depth-first order
    row_stop: int
    batch: PrefillBatch  # of these rows; rows without a run here see nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeLevels:
    levels: list[Level]
    seen: Int32  # [rows in depth-first order] a bit for each level that the row sees
    row_order: Int32  # [rows] the layout's row at each place of the depth-first order
    in_order: bool


def cascade_levels(layout: AttentionLayout) -> CascadeLevels:
    """Of segments of one row: a row sees all tokens of its runs."""
    forest = prefix_forest(layout)
    by_depth: dict[int, list[PrefixRun]] = {}
    for run in forest.runs:
        by_depth.setdefault(run.depth, []).append(run)
    seen = np.zeros(layout.num_rows, np.int32)
    levels: list[Level] = []
    for depth in sorted(by_depth):
        runs = sorted(by_depth[depth], key=lambda run: run.row_start)
        for run in runs:
            seen[run.row_start : run.row_stop] |= 1 << len(levels)
        levels.append(_level(runs, layout.page_size))
    return CascadeLevels(
        levels=levels, seen=seen, row_order=forest.row_order, in_order=forest.in_order
    )


def _level(runs: list[PrefixRun], page_size: int) -> Level:
    rows: list[int] = []
    tokens: list[int] = []
    end = runs[0].row_start
    for run in runs:
        if run.row_start > end:  # rows between, which end above this level
            rows.append(run.row_start - end)
            tokens.append(0)
        rows.append(run.rows)
        tokens.append(run.tokens)
        end = run.row_stop
    pages = [run.pages[: -(-run.tokens // page_size)] for run in runs]
    batch = PrefillBatch(
        rows=int32(rows),
        kv_tokens=int32(tokens),
        pages=int32(np.concatenate(pages)),
        page_size=page_size,
        causal=False,
    )
    return Level(row_start=runs[0].row_start, row_stop=end, batch=batch)
