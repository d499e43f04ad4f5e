"""The tables of a plan with fixed splits: the pages of its steps, its pieces and their merge."""

import heapq

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec.division import Division
from stemserve.kernels.codec.fixed import ChainSteps, RowGroups, chain_steps, row_groups
from stemserve.kernels.codec.host_tables import HostTables, host_tables
from stemserve.kernels.codec.pieces import Pieces
from stemserve.kernels.codec.rows import ordered_units, row_runs
from stemserve.kernels.codec.streams import NOTHING, TileStreams
from stemserve.kernels.codec.tiles import (
    CAUSAL,
    MASKED,
    OWN_ROWS,
    PAGE_BITS,
    STEP_TOKENS,
    TILE_ROWS,
    loaded_tokens,
    tile_cuts,
)
from stemserve.kernels.layout import AttentionLayout, Int32


def fixed_plan(layout: AttentionLayout, group: int, bins: int, division: Division) -> HostTables:
    tokens = division.fixed_split
    ordered = ordered_units(layout)
    runs = row_runs(layout, ordered)
    cuts = tile_cuts(runs, TILE_ROWS // group)
    groups = row_groups(chain_steps(layout, tokens, *ordered), cuts, tokens // STEP_TOKENS)
    streams = _lay_steps(layout, groups, runs.rows, cuts, group)
    pieces = _pieces(groups, streams, group, layout.page_size)
    owner = _assign(pieces.steps, bins, division.longest_first)
    return host_tables(layout, streams, _in_bins(pieces, owner), group, bins)


def _lay_steps(
    layout: AttentionLayout, groups: RowGroups, rows: Int32, cuts: Int32, group: int
) -> TileStreams:
    size, steps = layout.page_size, groups.steps
    per_step = STEP_TOKENS // size
    at = steps.begin[:, None] + np.arange(per_step, dtype=np.int32) * size  # [steps, pages]
    node, number = _page_numbers(layout, steps, at)
    loaded = np.clip(steps.end[:, None] - at, 0, size)
    words = np.where(loaded > 0, number | loaded << PAGE_BITS, 0)
    masks = _masks(groups, at, loaded, cuts, group)
    masks |= (masks != (TILE_ROWS << 8 | size << 16)) * np.int32(MASKED)
    spare = np.zeros(per_step, np.int32)  # the kernel looks a step ahead
    last = np.append(node, np.int32(-1)).reshape(-1)
    end = np.append(layout.node_start + layout.node_tokens, np.int32(0))[last[:-1]]
    # Pages that may gain tokens, and own rows, of which a plan is told by their node.
    shown = np.flatnonzero(((end - at.ravel() < size) | (last[:-1] < 0)) & (words.ravel() != 0))
    start = np.append(layout.node_start, np.int32(0))[last[shown]]
    before = np.where(last[shown] < 0, 0, (at.ravel()[shown] - start) // size)  # pages of the node
    return TileStreams(
        rows=rows,
        cuts=cuts,
        wide_low=NOTHING,
        wide_high=NOTHING,
        region_step=np.array([0, len(steps.begin)], np.int32),
        run_node=last[shown],
        # The pages before lie where these say, too, unless a chunk ends between.
        run_page=(shown - before).astype(np.int32),
        run_pages=(before + 1).astype(np.int32),
        run_low=np.repeat(steps.low, per_step)[shown],
        run_high=np.repeat(steps.high, per_step)[shown],
        words=np.append(words.ravel(), spare).astype(np.int32),
        masks=np.append(masks.ravel(), spare | np.int32(MASKED)).astype(np.int32),
        positions=NOTHING,
        starts=NOTHING,
    )


def _page_numbers(
    layout: AttentionLayout, steps: ChainSteps, at: Int32
) -> tuple[Int32, NDArray[np.integer]]:
    """The node of each page of the steps (-1: own rows), and the number in its word."""
    node = np.repeat(steps.node[:, None], at.shape[1], axis=1)
    start = np.append(layout.node_start, np.int32(0))  # node -1 reads the last
    while (above := (node >= 0) & (start[node] > at)).any():
        node[above] = layout.node_parent[node[above]]
    own = steps.own[:, None] + at
    if not layout.num_nodes:
        return node, own | OWN_ROWS
    place = layout.node_page_indptr[node] + (at - start[node]) // layout.page_size
    # Places beyond a chain's end are not loaded.
    place = np.minimum(place, len(layout.node_pages) - 1)
    stored = np.append(layout.node_pages, np.int32(0))[np.where(node < 0, -1, place)]
    return node, np.where(node < 0, own | OWN_ROWS, stored)


def _masks(groups: RowGroups, at: Int32, loaded: Int32, cuts: Int32, group: int) -> Int32:
    steps, piece = groups.steps, groups.piece
    low, high = steps.low[:, None], steps.high[:, None]
    tile = groups.tile[piece][:, None]
    causal = steps.visible[:, None] >= 0
    base, visible = steps.base[:, None], steps.visible[:, None]
    first = np.maximum(low, base + np.maximum(0, at - visible + 1))
    first = np.where(causal, np.minimum(first, high), low)
    seen = np.where(causal, np.clip(visible + first - base - at, 0, loaded), loaded)
    seen = np.where(first < high, seen, 0)
    # Most pages need no mask: where the first row sees all of one, so do the others.
    causal = causal & ((seen < loaded) | (first > low))
    # Rows of the tile that the piece does not change may see anything that is loaded.
    all_before = ~causal & (low == groups.low[piece][:, None])
    all_after = ~causal & (high == groups.high[piece][:, None]) | (high == cuts[tile + 1])
    mask_low = np.where(all_before, 0, (first - cuts[tile]) * group)
    mask_high = np.where(all_after, TILE_ROWS, (high - cuts[tile]) * group)
    mask_low = np.minimum(mask_low, mask_high)
    masks = mask_low | mask_high << 8 | seen << 16 | (causal & (seen > 0)) * CAUSAL
    return np.where(loaded > 0, masks, 0).astype(np.int32)


def _pieces(groups: RowGroups, streams: TileStreams, group: int, page_size: int) -> Pieces:
    """In the order in which a row's partial results are merged; all in bin 0."""
    count = len(groups.tile)
    steps = np.bincount(groups.piece, minlength=count).astype(np.int32)
    covered = _covered(groups)
    piece, place = np.nonzero(covered)
    row = groups.low[piece] + place
    parts = np.bincount(row, minlength=len(streams.rows))
    shared = np.bincount(piece, parts[row] > 1, count) > 0
    length = groups.high - groups.low
    direct = ~shared & (covered.sum(1) == length)
    size = np.where(direct, 0, length.astype(np.int64) * group)
    partial = np.cumsum(size) - size
    kept = ~direct[piece]
    row, value = row[kept], (partial[piece] + place * group)[kept]
    order = np.argsort(row, kind="stable")
    merged = np.bincount(row, minlength=len(streams.rows))
    merge = np.full((len(streams.rows), max(1, int(merged.max(initial=0)))), -1, np.int32)
    row, value = row[order], value[order]
    merge[row, np.arange(len(row)) - (np.cumsum(merged) - merged)[row]] = value
    tokens = loaded_tokens(streams.words).reshape(-1, STEP_TOKENS // page_size).sum(1)[:-1]
    return Pieces(
        bin=np.zeros(count, np.int32),
        tile=groups.tile,
        first=(np.cumsum(steps) - steps).astype(np.int32),
        steps=steps,
        low=groups.low,
        high=groups.high,
        direct=direct,
        partial=partial.astype(np.int32),
        tokens=np.bincount(groups.piece, tokens, count).astype(np.int32),
        partial_rows=int(size.sum()),
        merge_count=np.where((parts == 1) & (merged == 0), -1, merged).astype(np.int32),
        merge=merge,
    )


def _covered(groups: RowGroups) -> NDArray[np.bool_]:  # [pieces, rows of a tile]
    """Rows, from a piece's first on, that see some of its steps."""
    shape = (len(groups.tile), TILE_ROWS + 1)
    start = groups.piece * np.int32(shape[1]) - groups.low[groups.piece]
    places = shape[0] * shape[1]
    depth = np.bincount(start + groups.steps.low, minlength=places)
    depth -= np.bincount(start + groups.steps.high, minlength=places)
    covered: NDArray[np.bool_] = np.cumsum(depth.reshape(shape), axis=1)[:, :-1] > 0
    return covered


def _assign(steps: Int32, bins: int, longest_first: bool) -> Int32:
    """A CTA for each piece: the one with the least to do, longest first, or each in turn."""
    if not longest_first:
        return np.arange(len(steps), dtype=np.int32) % np.int32(bins)
    owner = np.zeros(len(steps), np.int32)
    heap = [(0, place) for place in range(bins)]
    lengths = steps.tolist()
    for piece in np.argsort(-steps, kind="stable").tolist():
        load, least = heapq.heappop(heap)
        owner[piece] = least
        heapq.heappush(heap, (load + lengths[piece] + 1, least))
    return owner


def _in_bins(pieces: Pieces, owner: Int32) -> Pieces:
    order = np.argsort(owner, kind="stable")
    return Pieces(
        bin=owner[order],
        tile=pieces.tile[order],
        first=pieces.first[order],
        steps=pieces.steps[order],
        low=pieces.low[order],
        high=pieces.high[order],
        direct=pieces.direct[order],
        partial=pieces.partial[order],
        tokens=pieces.tokens[order],
        partial_rows=pieces.partial_rows,
        merge_count=pieces.merge_count,
        merge=pieces.merge,
    )
