"""Tiles of query rows over a prefix forest, and the stream of pages that each tile reads.

Rows are taken in depth-first order, so that the rows below a node are consecutive. Rows times
query heads of one KV head are packed into tiles of 64 rows. A tile streams the pages of all nodes
that its rows descend from; a page carries the range of rows that may see it. A long node of several
tiles gets a region of its own, which all of these tiles read.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TileStreams:
    """Page streams, cut into steps: first the regions of wide nodes, then one region a tile."""

    rows: Int32  # [rows] the layout's row at each place
    cuts: Int32  # [tiles + 1] first row of each tile
    wide_low: Int32  # [wide] rows of the nodes with regions of their own
    wide_high: Int32  # [wide]
    region_step: Int32  # [wide + tiles + 1] first step of each region
    run_node: Int32  # [runs] nodes of the runs in the streams
    run_page: Int32  # [runs] first page of each in the streams
    run_pages: Int32  # [runs]
    run_low: Int32  # [runs] rows that see the run
    run_high: Int32  # [runs]
    words: Int32  # [steps * pages a step + spare] page number and tokens to load
    masks: Int32  # [steps * pages a step + spare] row range, tokens seen

    @property
    def num_tiles(self) -> int:
        return len(self.cuts) - 1

    @property
    def num_wide(self) -> int:
        return len(self.wide_low)


def _chains(layout: AttentionLayout) -> Int32:  # [levels, segments], -1 below a segment's node
    """Each segment's chain, the root on level 0."""
    parent = np.append(layout.node_parent, np.int32(-1))
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


def tile_streams(layout: AttentionLayout, group: int, bins: int) -> TileStreams:
    """Plan the tiles of one KV head and what each of them reads; `bins` CTAs share the work."""
    runs = row_runs(layout)
    cuts = tile_cuts(runs, TILE_ROWS // group)
    tile_of = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
    first = tile_of[runs.low]
    span = tile_of[runs.high - 1] - first + 1
    wide = _wide_runs(runs, span, layout.page_size, bins)
    narrow = np.flatnonzero(~wide) if len(wide) else np.arange(0)
    copies = span[narrow]
    run = np.repeat(narrow, copies)
    tile = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(copies) - copies, copies)
    low = np.maximum(runs.low[run], cuts[tile])
    order = np.argsort(low, kind="stable")  # a node before those below it
    run, tile, low = run[order], tile[order], low[order]
    high = np.minimum(runs.high[run], cuts[tile + 1])
    wide_run = np.flatnonzero(wide)
    return _lay_pages(
        layout,
        runs,
        _Placement(
            cuts=cuts,
            wide=wide_run,
            run=np.concatenate([wide_run, run]),
            region=np.concatenate([np.arange(len(wide_run)), tile + len(wide_run)]),
            low=low,
            high=high,
            group=group,
        ),
    )


def _wide_runs(
    runs: RowRuns, span: NDArray[np.integer], page_size: int, bins: int
) -> NDArray[np.bool_]:
    """Runs of several tiles that are long enough to be cut alike for all of them.

    Shorter ones stay in the L2 cache until the last tile has read them: with two CTAs an SM,
    2 * bins steps are about 16 MB over all KV heads, for any number of these.
    """
    steps = runs.pages * (page_size / STEP_TOKENS)
    share = float((steps * span).sum()) / bins
    long = steps > max(0.5 * share, 2.0 * bins)
    wide: NDArray[np.bool_] = (span > 1) & long & (2 * span <= bins) & (runs.causal == 0)
    candidates = np.flatnonzero(wide)
    if len(candidates) > 1:  # a CTA each at least, the largest first
        candidates = candidates[np.argsort(-(steps * span)[candidates], kind="stable")]
        wide[candidates[np.cumsum(span[candidates]) > bins]] = False
    return wide


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Which run goes into which region; the wide runs come first."""

    cuts: Int32
    wide: NDArray[np.integer]  # [wide] runs
    run: NDArray[np.integer]  # [placed]
    region: NDArray[np.integer]  # [placed], ascending
    low: Int32  # [placed - wide] rows of the tile that see the run
    high: Int32
    group: int


def _lay_pages(layout: AttentionLayout, runs: RowRuns, place: _Placement) -> TileStreams:
    per_step = STEP_TOKENS // layout.page_size
    wide, tiles = len(place.wide), len(place.cuts) - 1
    count = runs.pages[place.run].astype(np.int64)
    region_pages = np.bincount(place.region, count, wide + tiles).astype(np.int64)
    region_step = np.zeros(wide + tiles + 1, np.int32)
    np.cumsum(-(-region_pages // per_step), out=region_step[1:])
    before = np.cumsum(count) - count
    shift = region_step[:-1] * per_step - (np.cumsum(region_pages) - region_pages)
    start = before + shift[place.region]
    flat = np.arange(int(count.sum()), dtype=np.int64)
    source = np.repeat(runs.page[place.run] - before, count) + flat
    target = np.repeat(start - before, count) + flat if shift.any() else flat

    base = place.cuts[place.region[wide:] - wide]
    low = np.concatenate([np.zeros(wide, np.int64), (place.low - base) * place.group])
    # Rows that the tile does not have may see anything.
    top = np.where(
        place.high == place.cuts[place.region[wide:] - wide + 1],
        TILE_ROWS,
        (place.high - base) * place.group,
    )
    high = np.concatenate([np.full(wide, TILE_ROWS), top])
    size = int(region_step[-1] + 1) * per_step  # the kernel looks a step ahead
    words = np.zeros(size, np.int32)
    masks = np.zeros(size, np.int32)
    full = layout.page_size
    words[target] = layout.node_pages[source] | np.int32(full << PAGE_BITS)
    masks[target] = np.repeat((low | high << 8 | full << 16).astype(np.int32), count)

    last = start + count - 1
    tokens, causal = runs.tokens[place.run], runs.causal[place.run]
    seen = runs.seen[place.run].astype(np.int64)
    seen[wide:] += causal[wide:] * (place.low - runs.low[place.run[wide:]])
    partly = np.flatnonzero((tokens < full) | (causal > 0))
    last, tokens, seen, causal = last[partly], tokens[partly], seen[partly], causal[partly]
    words[last] += (tokens - full).astype(np.int32) << PAGE_BITS
    seen = np.minimum(seen, full)
    masks[last] = low[partly] | high[partly] << 8 | seen << 16 | causal * CAUSAL
    masks[masks != (TILE_ROWS << 8 | full << 16)] |= MASKED
    return TileStreams(
        rows=runs.rows,
        cuts=place.cuts,
        wide_low=runs.low[place.wide],
        wide_high=runs.high[place.wide],
        region_step=region_step,
        run_node=runs.node[place.run],
        run_page=start.astype(np.int32),
        run_pages=runs.pages[place.run],
        run_low=np.concatenate([runs.low[place.wide], place.low]),
        run_high=np.concatenate([runs.high[place.wide], place.high]),
        words=words,
        masks=masks,
    )
