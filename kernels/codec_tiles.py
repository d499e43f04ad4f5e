"""Query rows of a prefix forest in depth-first order, and tiles of them.

Rows are taken in depth-first order, so that the rows below a node are consecutive. Rows times
query heads of one KV head are packed into tiles of 64 rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import AttentionLayout, Int32

TILE_ROWS = 64
STEP_TOKENS = 64  # tokens of one step of the kernel's loop
PAGE_BITS = 24  # of a page word: the page number; above it, how many of its tokens to load
MASKED = 1 << 28  # of some mask word of a step: not every row sees every token
CAUSAL = 1 << 23  # of a mask word: each row sees one token more than the row before


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuns:
    """Runs of pages that consecutive rows see alike; rows are in depth-first order."""

    rows: Int32  # [rows] the layout's row at each place
    node: Int32  # [runs]
    page: Int32  # [runs] first page, an index into the layout's node_pages
    pages: Int32  # [runs]
    tokens: Int32  # [runs] tokens in the last page
    seen: Int32  # [runs] of these, tokens that row `low` sees
    causal: Int32  # [runs] 1: row low + i sees i tokens more
    low: Int32  # [runs] first row
    high: Int32  # [runs] row after the last


def _chains(layout: AttentionLayout) -> Int32:  # [levels, segments], -1 below a segment's node
    """Each segment's chain, the root on level 0."""
    parent = np.concatenate([layout.node_parent, np.array([-1], np.int32)])
    levels = [layout.segment_node]
    while True:
        above = parent[levels[-1]]
        if above.max(initial=-1) < 0:
            break
        levels.append(above)
    chains = np.stack(levels[::-1])
    depth = (chains >= 0).sum(0)
    if depth.min(initial=len(levels)) == len(levels):
        return chains
    source = np.arange(len(levels))[:, None] + (len(levels) - depth)
    padded = np.vstack([chains, np.full((1, chains.shape[1]), -1, np.int32)])
    return np.take_along_axis(padded, np.minimum(source, len(levels)), 0)


def _ranges(chains: Int32) -> tuple[Int32, Int32, Int32]:
    """Nodes with segments below them, by level; the first segment of each and the one after."""
    edge = chains[:, 1:] != chains[:, :-1]
    first = np.ones(chains.shape, np.bool_)
    first[:, 1:] = edge
    first &= chains >= 0
    last = np.ones(chains.shape, np.bool_)
    last[:, :-1] = edge
    last &= chains >= 0
    level, low = np.nonzero(first)
    return chains[level, low], low.astype(np.int32), (np.nonzero(last)[1] + 1).astype(np.int32)


def _preorder(layout: AttentionLayout, chains: Int32) -> NDArray[np.intp]:
    """An order of the segments that puts those below any node together."""
    nodes = layout.num_nodes
    below = np.bincount(chains.ravel() + 1, minlength=nodes + 1)[1:]
    direct = np.bincount(layout.segment_node + 1, minlength=nodes + 1)
    siblings = np.argsort(layout.node_parent, kind="stable")
    parent = layout.node_parent[siblings]
    before = np.cumsum(below[siblings]) - below[siblings]
    family = np.concatenate(([True], parent[1:] != parent[:-1]))
    offset = np.zeros(nodes + 1, np.int64)  # the last place is for node -1
    offset[siblings] = before - before[np.maximum.accumulate(np.where(family, np.arange(nodes), 0))]
    offset[siblings] += np.where(parent >= 0, direct[parent + 1], direct[0])
    return np.argsort(offset[chains].sum(0), kind="stable")


def row_runs(layout: AttentionLayout) -> RowRuns:
    """Put the rows in depth-first order and list what they see."""
    chains = _chains(layout)
    node, low, high = _ranges(chains)
    segment_rows = layout.segment_rows
    first_row, own_node = layout.segment_indptr[:-1], layout.segment_node
    if len(node) and np.bincount(node).max() > 1:
        order = _preorder(layout, chains)
        node, low, high = _ranges(chains[:, order])
        segment_rows, first_row, own_node = segment_rows[order], first_row[order], own_node[order]
    indptr = np.zeros(len(segment_rows) + 1, np.int32)
    np.cumsum(segment_rows, out=indptr[1:])
    rows = np.repeat(first_row - indptr[:-1], segment_rows) + np.arange(indptr[-1], dtype=np.int32)
    filled = layout.node_tokens[node] > 0
    node, low, high = node[filled], low[filled], high[filled]
    tokens, page = layout.node_tokens[node], layout.node_page_indptr[node]
    pages = -(-tokens // layout.page_size)
    tail = tokens - (pages - 1) * layout.page_size
    runs = RowRuns(
        rows=rows,
        node=node,
        page=page,
        pages=pages,
        tokens=tail,
        seen=tail,
        causal=np.zeros_like(pages),
        low=indptr[low],
        high=indptr[high],
    )
    if segment_rows.max(initial=0) <= 1:
        return runs
    own = (own_node[low] == node) & (high - low == 1) & (segment_rows[low] > 1)
    return _split_tails(runs, own, layout.page_size)


def _split_tails(runs: RowRuns, own: NDArray[np.bool_], size: int) -> RowRuns:
    """Give the pages that a segment's rows do not all see whole a run each.

    The last tokens of such a segment's chain are its own rows, in a node of its own (`own`).
    """
    rows = runs.high - runs.low
    tokens = (runs.pages - 1) * size + runs.tokens
    whole = np.where(own, (tokens - rows + 1) // size, runs.pages)  # pages that all rows see whole
    count = np.where(own, runs.pages - whole, 0)
    tail = np.repeat(np.arange(len(rows)), count)
    start = whole[tail] + np.arange(len(tail)) - np.repeat(np.cumsum(count) - count, count)
    first = np.maximum(0, start * size - (tokens - rows + 1)[tail] + 1)  # first row that sees it
    loaded = np.minimum(size, tokens[tail] - start * size)
    seen = np.minimum(size, (tokens - rows + 1)[tail] + first - start * size)
    head = np.flatnonzero(whole)
    last = np.where(own[head], size, runs.tokens[head])

    def joined(a: NDArray[np.integer], b: NDArray[np.integer]) -> Int32:
        return np.concatenate([a, b]).astype(np.int32)

    return RowRuns(
        rows=runs.rows,
        node=joined(runs.node[head], runs.node[tail]),
        page=joined(runs.page[head], runs.page[tail] + start),
        pages=joined(whole[head], np.ones_like(tail)),
        tokens=joined(last, loaded),
        seen=joined(last, seen),
        causal=joined(np.zeros_like(head), np.ones_like(tail)),
        low=joined(runs.low[head], runs.low[tail] + first),
        high=joined(runs.high[head], runs.high[tail]),
    )


def tile_cuts(runs: RowRuns, per_tile: int) -> Int32:
    """Tile borders: at most `per_tile` rows a tile, where the fewest tokens are read twice."""
    rows = len(runs.rows)
    shared = runs.high - runs.low > 1
    low, high, pages = runs.low[shared], runs.high[shared], runs.pages[shared]
    torn = np.bincount(low + 1, pages, rows + 2) - np.bincount(high, pages, rows + 2)
    cost = np.cumsum(torn).tolist()
    cuts = [0]
    slack = max(1, per_tile // 4)
    while rows - cuts[-1] > per_tile:
        latest = cuts[-1] + per_tile
        window = cost[latest : latest - slack : -1]
        cuts.append(latest - window.index(min(window)))
    return np.array([*cuts, rows], np.int32)
