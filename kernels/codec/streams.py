"""The stream of pages that each tile of query rows reads.

A tile streams the pages of all nodes that its rows descend from; a page carries the range of rows
that may see it. A long node of several tiles gets a region of its own, which all of these read.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec.rows import (
    RowRuns,
    chosen,
    counted,
    joined,
    over_rows,
    row_runs,
    within_window,
)
from stemserve.kernels.codec.tiles import (
    CAUSAL,
    MASKED,
    OWN_ROWS,
    PAGE_BITS,
    STEP_TOKENS,
    TILE_ROWS,
    tile_cuts,
)
from stemserve.kernels.layout import AttentionLayout, Int32

NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileStreams:
    """Page streams, cut into steps: first the regions of wide nodes, then one region a tile."""

    rows: Int32  # [rows] the layout's row at each place
    cuts: Int32  # [tiles + 1] first row of each tile
    wide_low: Int32  # [wide] rows of the nodes with regions of their own
    wide_high: Int32  # [wide]
    region_step: Int32  # [wide + tiles + 1] first step of each region
    run_node: Int32  # [runs] nodes of the runs in the streams, -1: the step's own rows
    run_page: Int32  # [runs] first page of each in the streams
    run_pages: Int32  # [runs]
    run_low: Int32  # [runs] rows that see the run
    run_high: Int32  # [runs]
    words: Int32  # [steps * pages a step + spare] page number and tokens to load
    masks: Int32  # [steps * pages a step + spare] row range, tokens seen
    positions: Int32  # with a window, [as masks] place of a page's first token in its chain
    starts: Int32  # with a window, [rows] place of the first token that each row sees

    @property
    def num_wide(self) -> int:
        return len(self.wide_low)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Which run goes into which region; the wide runs come first."""

    cuts: Int32
    num_wide: int
    region: NDArray[np.integer]  # [placed], ascending
    runs: RowRuns  # as the region's rows see them; one page where these see different tokens


def tile_streams(layout: AttentionLayout, group: int, bins: int, window: int = 0) -> TileStreams:
    """Plan the tiles of one KV head and what each of them reads.

    `bins` CTAs share the work; 0: none of it, so that no node gets a region of its own.
    """
    runs = row_runs(layout)
    starts = NOTHING
    if window and len(runs.rows):
        starts = np.maximum(0, runs.visible - window).astype(np.int32)
        runs, _ = within_window(runs, starts, layout.page_size)
    place = _place_runs(runs, tile_cuts(runs, TILE_ROWS // group), layout.page_size, bins)
    if len(starts):
        placed, left = within_window(place.runs, starts, layout.page_size)
        place = replace(place, runs=placed, region=place.region[left])
    return _lay_pages(layout, place, group, starts)


def _place_runs(runs: RowRuns, cuts: Int32, page_size: int, bins: int) -> _Placement:
    tile_of = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), cuts[1:] - cuts[:-1])
    first = tile_of[runs.low]
    span = tile_of[runs.high - 1] - first + 1
    is_wide = _wide_runs(runs, span, page_size, bins)
    wide, narrow = np.flatnonzero(is_wide), np.flatnonzero(~is_wide)
    run, step = counted(span[narrow])
    run = narrow[run]
    tile = first[run] + step
    low = np.maximum(runs.low[run], cuts[tile])
    high = np.minimum(runs.high[run], cuts[tile + 1])
    seen = (runs.seen[run] + runs.causal[run] * (low - runs.low[run])).astype(np.int32)
    placed = chosen(runs, run, low=low, high=high, seen=seen)
    if placed.causal.any():
        placed, owner = _unfold(placed, page_size)
        tile = tile[owner]
    order = np.argsort(placed.low, kind="stable")  # a node before those below it
    return _Placement(
        cuts=cuts,
        num_wide=len(wide),
        region=np.concatenate([np.arange(len(wide)), tile[order] + len(wide)]),
        runs=joined(chosen(runs, wide), chosen(placed, order)),
    )


def _unfold(runs: RowRuns, size: int) -> tuple[RowRuns, NDArray[np.intp]]:
    """Of causal runs the pages that all rows see whole, then the others one by one.

    Beside them the run that each comes from.
    """
    causal, rows = runs.causal > 0, runs.high - runs.low
    whole = np.where(causal, np.minimum(runs.pages, runs.seen // size), 0)
    last = np.minimum(runs.pages, -(-(runs.seen + rows - 1) // size))  # page after the last seen
    owner, part = counted(np.where(causal, (whole > 0) + last - whole, 1))
    single = causal[owner] & ((part > 0) | (whole[owner] == 0))
    whole, pages = whole[owner], runs.pages[owner]
    page = np.where(single, whole + part - (whole > 0), 0)
    first = np.where(single, np.maximum(0, page * size - runs.seen[owner] + 1), 0)
    pages_left = np.where(single, 1, np.where(causal[owner], whole, pages))
    unfolded = chosen(
        runs,
        owner,
        page=runs.page[owner] + page * np.where(runs.node[owner] < 0, size, 1),
        position=runs.position[owner] + page * size,
        pages=pages_left,
        tokens=np.where(page + pages_left < pages, size, runs.tokens[owner]),
        causal=single.astype(np.int32),
        seen=runs.seen[owner] + first - page * size,
        low=runs.low[owner] + first,
    )
    return unfolded, owner


def _wide_runs(
    runs: RowRuns, span: NDArray[np.integer], page_size: int, bins: int
) -> NDArray[np.bool_]:
    """Runs of several tiles that are long enough to be cut alike for all of them.

    Shorter ones stay in the L2 cache until the last tile has read them: with two CTAs an SM,
    2 * bins steps are about 16 MB over all KV heads, for any number of these.
    """
    tokens = runs.pages.astype(np.int64) * page_size
    read = tokens * span
    long = (2 * bins * tokens > read.sum()) & (tokens > 2 * bins * STEP_TOKENS)
    wide: NDArray[np.bool_] = (span > 1) & long & (2 * span <= bins) & (runs.causal == 0)
    candidates = np.flatnonzero(wide)
    if len(candidates) > 1:  # a CTA each at least, the largest first
        candidates = candidates[np.argsort(-read[candidates], kind="stable")]
        wide[candidates[np.cumsum(span[candidates]) > bins]] = False
    return wide


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagePlaces:
    """Where the placed runs' pages are in the streams; a region begins with a step."""

    region_step: Int32  # [regions + 1] first step
    counts: NDArray[np.int64]  # [placed] pages of each run
    before: NDArray[np.int64]  # [placed] pages of all runs before it
    first: NDArray[np.int64]  # [placed] place of its first page
    target: slice | NDArray[np.int64]  # [pages] place of each
    num_places: int


def _place_pages(place: _Placement, per_step: int) -> _PagePlaces:
    regions = place.num_wide + len(place.cuts) - 1
    counts = place.runs.pages.astype(np.int64)
    region_pages = np.bincount(place.region, counts, regions).astype(np.int64)
    region_step = np.zeros(regions + 1, np.int32)
    np.cumsum(-(-region_pages // per_step), out=region_step[1:])
    before = np.cumsum(counts) - counts
    shift = region_step[:-1] * per_step - (np.cumsum(region_pages) - region_pages)
    first = before + shift[place.region]
    target: slice | NDArray[np.int64] = slice(int(counts.sum()))
    if shift.any():
        target = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    return _PagePlaces(
        region_step=region_step,
        counts=counts,
        before=before,
        first=first,
        target=target,
        num_places=int(region_step[-1] + 1) * per_step,  # the kernel looks a step ahead
    )


def _lay_pages(
    layout: AttentionLayout, place: _Placement, group: int, starts: Int32
) -> TileStreams:
    """Lay the runs' pages side by side."""
    page_size, runs, wide = layout.page_size, place.runs, slice(place.num_wide)
    pages = _place_pages(place, STEP_TOKENS // page_size)
    counts, target = pages.counts, pages.target
    words, masks = (np.zeros(pages.num_places, np.int32) for _ in range(2))
    words[target] = _page_numbers(layout, runs, pages) | np.int32(page_size << PAGE_BITS)
    masks[target] = np.repeat(_row_masks(place, group) | page_size << 16, counts)
    _mark_last_pages(runs, pages.first + counts - 1, (words, masks), page_size)
    whole = TILE_ROWS << 8 | page_size << 16
    positions = NOTHING
    if len(starts):
        positions = np.zeros(pages.num_places, np.int32)
        begin = runs.position - pages.before * page_size
        positions[target] = np.repeat(begin, counts) + np.arange(int(counts.sum())) * page_size
        latest = over_rows(np.maximum, starts, runs.low, runs.high)
        masks[target] |= (positions[target] < np.repeat(latest, counts)) * np.int32(MASKED)
    masks |= (masks != whole) * np.int32(MASKED)
    return TileStreams(
        rows=runs.rows,
        cuts=place.cuts,
        wide_low=runs.low[wide],
        wide_high=runs.high[wide],
        region_step=pages.region_step,
        run_node=runs.node,
        run_page=pages.first.astype(np.int32),
        run_pages=runs.pages,
        run_low=runs.low,
        run_high=runs.high,
        words=words,
        masks=masks,
        positions=positions,
        starts=starts,
    )


def _page_numbers(layout: AttentionLayout, runs: RowRuns, pages: _PagePlaces) -> Int32:
    """Of all pages in the order of their runs: a page of the pool, or the first of own rows."""
    flat = np.arange(int(pages.counts.sum()), dtype=np.int64)
    is_own = runs.node < 0
    if not is_own.any():
        return layout.node_pages[np.repeat(runs.page - pages.before, pages.counts) + flat]
    own = np.repeat(is_own, pages.counts)
    step = flat - np.repeat(pages.before, pages.counts)
    source = np.repeat(runs.page, pages.counts) + step * np.where(own, layout.page_size, 1)
    number = source.astype(np.int32) | OWN_ROWS
    number[~own] = layout.node_pages[source[~own]]
    return number


def _row_masks(place: _Placement, group: int) -> Int32:
    """Row ranges of the runs, in rows of their tiles; a wide region's tiles see all of it."""
    wide, runs = place.num_wide, place.runs
    tile = place.region[wide:] - wide
    masks = np.full(len(runs.low), TILE_ROWS << 8, np.int32)
    low = (runs.low[wide:] - place.cuts[tile]) * group
    high = (runs.high[wide:] - place.cuts[tile]) * group
    # Rows that the tile does not have may see anything.
    high[runs.high[wide:] == place.cuts[tile + 1]] = TILE_ROWS
    masks[wide:] = low | high << 8
    return masks


def _mark_last_pages(
    runs: RowRuns, last: NDArray[np.int64], words_and_masks: tuple[Int32, Int32], full: int
) -> None:
    """Write how many tokens of each run's last page are loaded and seen."""
    words, masks = words_and_masks
    partly = np.flatnonzero((runs.tokens < full) | (runs.causal > 0))
    at, causal = last[partly], runs.causal[partly]
    seen = np.where(causal > 0, np.minimum(runs.seen[partly], full), runs.tokens[partly])
    words[at] += (runs.tokens[partly] - full) << PAGE_BITS
    masks[at] = masks[at] & 0xFFFF | seen << 16 | causal * CAUSAL
