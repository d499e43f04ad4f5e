"""The stream of pages that each tile of query rows reads.

A tile streams the pages of all nodes that its rows descend from; a page carries the range of rows
that may see it. A long node of several tiles gets a region of its own, which all of these read.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec_rows import RowRuns, row_runs
from stemserve.kernels.codec_tiles import (
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
    wide: NDArray[np.integer]  # [wide] runs
    run: NDArray[np.integer]  # [placed]
    region: NDArray[np.integer]  # [placed], ascending
    low: Int32  # [placed] rows of the region that see the run
    high: Int32


def tile_streams(layout: AttentionLayout, group: int, bins: int, window: int = 0) -> TileStreams:
    """Plan the tiles of one KV head and what each of them reads.

    `bins` CTAs share the work; 0: none of it, so that no node gets a region of its own.
    """
    runs = row_runs(layout)
    starts = NOTHING
    if window:
        starts = np.maximum(0, runs.visible - window).astype(np.int32)
        runs = _within_window(runs, starts, layout.page_size)
    place = _place_runs(runs, tile_cuts(runs, TILE_ROWS // group), layout.page_size, bins)
    return _lay_pages(layout, runs, place, group, starts)


def _over_rows(reduce: np.ufunc, values: Int32, low: Int32, high: Int32) -> Int32:
    """The reduction of `values` over each range of rows."""
    pairs = np.empty(2 * len(low), np.int64)
    pairs[::2], pairs[1::2] = low, high
    # The last range may end at the array's end, which reduceat does not take as an index.
    found: Int32 = reduce.reduceat(np.concatenate([values, values[-1:]]), pairs)[::2]
    return found


def _within_window(runs: RowRuns, starts: Int32, page_size: int) -> RowRuns:
    """Drop the pages that lie before the windows of all their rows."""
    if not len(runs.page):
        return runs
    first = _over_rows(np.minimum, starts, runs.low, runs.high)
    drop = np.clip((first - runs.position) // page_size, 0, runs.pages)
    kept = {f.name: getattr(runs, f.name)[drop < runs.pages] for f in fields(runs)[2:]}
    drop = drop[drop < runs.pages]
    kept |= {"page": kept["page"] + drop, "pages": kept["pages"] - drop}
    kept |= {"position": kept["position"] + drop * page_size}
    return RowRuns(rows=runs.rows, visible=runs.visible, **kept)


def _place_runs(runs: RowRuns, cuts: Int32, page_size: int, bins: int) -> _Placement:
    tile_of = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), cuts[1:] - cuts[:-1])
    first = tile_of[runs.low]
    span = tile_of[runs.high - 1] - first + 1
    is_wide = _wide_runs(runs, span, page_size, bins)
    wide, narrow = np.flatnonzero(is_wide), np.flatnonzero(~is_wide)
    copies = span[narrow]
    run = np.repeat(narrow, copies)
    tile = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(copies) - copies, copies)
    low = np.maximum(runs.low[run], cuts[tile])
    order = np.argsort(low, kind="stable")  # a node before those below it
    run, tile, low = run[order], tile[order], low[order]
    high = np.minimum(runs.high[run], cuts[tile + 1])
    return _Placement(
        cuts=cuts,
        wide=wide,
        run=np.concatenate([wide, run]),
        region=np.concatenate([np.arange(len(wide)), tile + len(wide)]),
        low=np.concatenate([runs.low[wide], low]),
        high=np.concatenate([runs.high[wide], high]),
    )


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


def _place_pages(runs: RowRuns, place: _Placement, per_step: int) -> _PagePlaces:
    regions = len(place.wide) + len(place.cuts) - 1
    counts = runs.pages[place.run].astype(np.int64)
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
    layout: AttentionLayout, runs: RowRuns, place: _Placement, group: int, starts: Int32
) -> TileStreams:
    """Lay the runs' pages side by side."""
    page_size = layout.page_size
    pages = _place_pages(runs, place, STEP_TOKENS // page_size)
    counts, target = pages.counts, pages.target
    flat = np.arange(int(counts.sum()), dtype=np.int64)
    words, masks = (np.zeros(pages.num_places, np.int32) for _ in range(2))
    words[target] = _page_numbers(layout, runs, place, pages) | np.int32(page_size << PAGE_BITS)
    masks[target] = np.repeat(_row_masks(place, group) | page_size << 16, counts)
    _mark_last_pages(runs, place, pages.first + counts - 1, (words, masks), page_size)
    whole = TILE_ROWS << 8 | page_size << 16
    positions = NOTHING
    if len(starts):
        positions = np.zeros(pages.num_places, np.int32)
        begin = runs.position[place.run] - pages.before * page_size
        positions[target] = np.repeat(begin, counts) + flat * page_size
        latest = _over_rows(np.maximum, starts, place.low, place.high)
        masks[target] |= (positions[target] < np.repeat(latest, counts)) * np.int32(MASKED)
    masks |= (masks != whole) * np.int32(MASKED)
    return TileStreams(
        rows=runs.rows,
        cuts=place.cuts,
        wide_low=runs.low[place.wide],
        wide_high=runs.high[place.wide],
        region_step=pages.region_step,
        run_node=runs.node[place.run],
        run_page=pages.first.astype(np.int32),
        run_pages=runs.pages[place.run],
        run_low=place.low,
        run_high=place.high,
        words=words,
        masks=masks,
        positions=positions,
        starts=starts,
    )


def _page_numbers(
    layout: AttentionLayout, runs: RowRuns, place: _Placement, pages: _PagePlaces
) -> Int32:
    """Of all pages in the order of their runs: a page of the pool, or the first of own rows."""
    counts = pages.counts
    flat = np.arange(int(counts.sum()), dtype=np.int64)
    source = np.repeat(runs.page[place.run] - pages.before, counts) + flat
    is_own = runs.node[place.run] < 0
    if not is_own.any():
        return layout.node_pages[source]
    own = np.repeat(is_own, counts)
    number = source.astype(np.int32) | OWN_ROWS
    number[~own] = layout.node_pages[source[~own]]
    return number


def _row_masks(place: _Placement, group: int) -> Int32:
    """Row ranges of the runs, in rows of their tiles; a wide region's tiles see all of it."""
    wide = len(place.wide)
    tile = place.region[wide:] - wide
    masks = np.full(len(place.run), TILE_ROWS << 8, np.int32)
    low = (place.low[wide:] - place.cuts[tile]) * group
    high = (place.high[wide:] - place.cuts[tile]) * group
    # Rows that the tile does not have may see anything.
    high[place.high[wide:] == place.cuts[tile + 1]] = TILE_ROWS
    masks[wide:] = low | high << 8
    return masks


def _mark_last_pages(
    runs: RowRuns,
    place: _Placement,
    last: NDArray[np.int64],
    words_and_masks: tuple[Int32, Int32],
    full: int,
) -> None:
    """Write how many tokens of each run's last page are loaded and seen."""
    words, masks = words_and_masks
    tokens, causal = runs.tokens[place.run], runs.causal[place.run]
    seen = runs.seen[place.run] + causal * (place.low - runs.low[place.run])
    partly = np.flatnonzero((tokens < full) | (causal > 0))
    at = last[partly]
    words[at] += (tokens[partly] - full) << PAGE_BITS
    masks[at] = masks[at] & 0xFFFF | np.minimum(seen[partly], full) << 16 | causal[partly] * CAUSAL
