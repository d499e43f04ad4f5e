"""Division of tile streams into equal pieces, one list of pieces a CTA, and the merge of their results."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec_tiles import PAGE_BITS, STEP_TOKENS, TILE_ROWS, TileStreams
from stemserve.kernels.layout import Int32

PIECE_STEPS = 0.3  # what a piece costs beside its steps, in steps (H200)
RECORD = 16  # fields of a piece record before its first pages; see `records`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bins:
    """Where the CTAs' shares end on the streams, and the pieces of the wide regions."""

    wide: NDArray[np.int64]  # [pieces, 4] region, first step in it, steps, tile after the first
    wide_bin: NDArray[np.int64]  # [pieces]
    stream_bin: NDArray[np.int64]  # [shares] bins in the order in which they take from the streams
    share: NDArray[np.float64]  # [shares] steps that each takes, its first piece's cost taken off


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What the CTAs of one KV head do, and which partial results make a row."""

    bin: Int32  # [pieces] CTA
    tile: Int32  # [pieces]
    first: Int32  # [pieces] first step
    steps: Int32  # [pieces]
    low: Int32  # [pieces] first row that the piece changes
    high: Int32  # [pieces]
    direct: NDArray[np.bool_]  # [pieces] all its rows are in no other piece
    partial: Int32  # [pieces] first partial row (rows times group), 0 if direct
    partial_rows: int
    merge_count: Int32  # [rows] partials of each row, -1: written by its only piece
    merge: Int32  # [rows, most partials] partial row of the first head of the group

    @cached_property
    def num_bins(self) -> int:
        return int(self.bin.max(initial=-1)) + 1


def _fits(level: float, wide: list[tuple[int, int]], need: float, bins: int) -> bool:
    """Whether no bin must hold more than `level` steps."""
    room = 0.0
    for steps, tiles in wide:
        cuts = math.ceil(steps / (level - PIECE_STEPS))
        bins -= cuts * tiles
        room += cuts * tiles * max(0.0, level - steps / cuts - 2 * PIECE_STEPS)
    return bins >= 0 and room + bins * (level - PIECE_STEPS) >= need


def _level(wide: list[tuple[int, int]], need: float, bins: int) -> float:
    """The lowest fill of the fullest bin, by bisection from below (the mean) and above."""
    total = need + sum(steps * tiles for steps, tiles in wide)
    low = max(total / bins, 2.0) + PIECE_STEPS
    if _fits(low, wide, need, bins):
        return low
    high = 2 * low
    while not _fits(high, wide, need, bins):
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(middle, wide, need, bins) else (middle, high)
    return high


def _bins(streams: TileStreams, bins: int) -> _Bins:
    """Give the wide regions bins of their own, cut alike for all their tiles; the rest is shared."""
    steps = np.diff(streams.region_step)
    tile_steps = steps[streams.num_wide :]
    need = float(tile_steps.sum() + PIECE_STEPS * len(tile_steps))
    first = np.searchsorted(streams.cuts, streams.wide_low, "right") - 1
    tiles = np.searchsorted(streams.cuts, streams.wide_high, "left") - first
    wide = list(zip(steps[: streams.num_wide].tolist(), tiles.tolist(), strict=True))
    level = _level(wide, need, bins)
    pieces: list[tuple[int, int, int, int]] = []
    fill: list[float] = []
    for region, (length, copies) in enumerate(wide):
        cuts = math.ceil(length / (level - PIECE_STEPS))
        for cut in range(cuts):
            start, stop = cut * length // cuts, (cut + 1) * length // cuts
            pieces += [(region, start, stop - start, copy) for copy in range(copies)]
            fill += [stop - start + PIECE_STEPS] * copies
    free = bins - len(fill)
    room = np.maximum(0.0, level - PIECE_STEPS - np.asarray(fill, np.float64))
    room[room < 1] = 0.0
    free = min(free, math.ceil(max(0.0, need - room.sum()) / (level - PIECE_STEPS)))
    share = np.concatenate([np.full(free, level - PIECE_STEPS), room])
    order = np.concatenate([np.arange(len(fill), len(fill) + free), np.arange(len(fill))])
    used = share > 0
    return _Bins(
        wide=np.array(pieces, np.int64).reshape(-1, 4),
        wide_bin=np.arange(len(pieces)),
        stream_bin=order[used],
        share=share[used] * (need / max(float(share.sum()), 1e-9)),
    )


def _stream_pieces(streams: TileStreams, bins: _Bins) -> tuple[Int32, Int32, Int32, Int32]:
    """Cut the tiles' streams, laid end to end, at the bins' shares: bin, tile, first step, steps."""
    start = streams.region_step[streams.num_wide :].astype(np.int64)
    steps = np.diff(start)
    cost_start = start[:-1] - start[0] + PIECE_STEPS * np.arange(len(steps))
    ends = np.cumsum(bins.share)[:-1]
    tile = np.searchsorted(cost_start, ends, "right") - 1
    inside = np.rint(ends - cost_start[tile] - PIECE_STEPS).astype(np.int64)
    ends = start[tile] + np.clip(inside, 0, steps[tile])
    edges = np.unique(np.concatenate([start, ends]))
    first = edges[:-1]
    tile = np.searchsorted(start, first, "right") - 1
    owner = bins.stream_bin[np.searchsorted(ends, first, "right")] if len(first) else first
    return (
        owner.astype(np.int32),
        tile.astype(np.int32),
        first.astype(np.int32),
        np.diff(edges).astype(np.int32),
    )


def _row_ranges(
    streams: TileStreams, first: Int32, steps: Int32, per_step: int
) -> tuple[Int32, Int32]:
    """Rows that the stream pieces change: the union over the runs that each covers."""
    if not len(first):
        return first, first
    narrow = slice(streams.num_wide, None)
    page, low, high = streams.run_page[narrow], streams.run_low[narrow], streams.run_high[narrow]
    begin = np.searchsorted(page, first * per_step, "right") - 1
    end = np.searchsorted(page, (first + steps) * per_step, "left")
    pairs = np.stack([begin, end], axis=1).ravel()
    # The last pair may end at the array's end, which reduceat does not take as an index.
    lows = np.minimum.reduceat(np.append(low, low[-1:]), pairs)[::2]
    highs = np.maximum.reduceat(np.append(high, high[-1:]), pairs)[::2]
    return lows, highs


def divide(streams: TileStreams, group: int, page_size: int, bins: int) -> Pieces:
    """Pieces of about equal cost for `bins` CTAs, and the merge table of their partial results."""
    share = _bins(streams, bins)
    owner, tile, first, steps = _stream_pieces(streams, share)
    low, high = _row_ranges(streams, first, steps, STEP_TOKENS // page_size)
    if len(share.wide):
        region, start, length, copy = share.wide.T
        wide_tile = np.searchsorted(streams.cuts, streams.wide_low, "right")[region] - 1 + copy
        owner = np.concatenate([share.wide_bin, owner])
        tile = np.concatenate([wide_tile, tile])
        first = np.concatenate([streams.region_step[region] + start, first])
        steps = np.concatenate([length, steps])
        low = np.concatenate(
            [np.maximum(streams.wide_low[region], streams.cuts[wide_tile]), low]
        )
        high = np.concatenate(
            [np.minimum(streams.wide_high[region], streams.cuts[wide_tile + 1]), high]
        )
    order = np.argsort(owner, kind="stable")
    return _with_merge(
        [a[order].astype(np.int32) for a in (owner, tile, first, steps, low, high)],
        len(streams.rows),
        group,
    )


def _with_merge(columns: list[Int32], rows: int, group: int) -> Pieces:
    owner, tile, first, steps, low, high = columns
    count = np.bincount(low, minlength=rows + 1) - np.bincount(high, minlength=rows + 1)
    count = np.cumsum(count)[:rows]
    several = np.zeros(rows + 1, np.int64)
    np.cumsum(count != 1, out=several[1:])
    direct = several[high] == several[low]
    length = (high - low).astype(np.int64)
    size = np.where(direct, 0, length * group)
    partial = np.cumsum(size) - size

    kept = np.flatnonzero(~direct)
    runs = length[kept]
    before = np.cumsum(runs) - runs
    row = np.repeat(low[kept] - before, runs) + np.arange(int(runs.sum()))
    value = np.repeat(partial[kept] - low[kept] * group, runs) + row * group
    merged = np.bincount(row, minlength=rows)
    place = np.argsort(row.astype(np.uint16) if rows < 1 << 16 else row, kind="stable")
    row = row[place]
    merge = np.full((rows, max(1, int(merged.max(initial=0)))), -1, np.int32)
    merge[row, np.arange(len(row)) - (np.cumsum(merged) - merged)[row]] = value[place]
    return Pieces(
        bin=owner,
        tile=tile,
        first=first,
        steps=steps,
        low=low,
        high=high,
        direct=direct,
        partial=partial.astype(np.int32),
        partial_rows=int(size.sum()),
        merge_count=np.where((count == 1) & (merged == 0), -1, merged).astype(np.int32),
        merge=merge,
    )


def records(streams: TileStreams, pieces: Pieces, group: int, bins: int, per_step: int) -> Int32:
    """Piece records for the kernel; the first `bins` are the CTAs' first pieces.

    Fields: first row, rows of the tile, steps, first step, where row 0's partial would go, first
    row of the tile that the piece changes, row after the last, direct, next record or -1; then the
    page words and masks of the first step, so that a CTA starts with one load.
    """
    head = np.ones(len(pieces.bin), np.bool_)
    head[1:] = pieces.bin[1:] != pieces.bin[:-1]
    place = np.where(head, pieces.bin, bins - 1 + np.cumsum(~head))
    table = np.zeros((bins + int((~head).sum()), RECORD + 2 * per_step), np.int32)
    table[:, 8] = -1
    base = streams.cuts[pieces.tile]
    low, high = (pieces.low - base) * group, (pieces.high - base) * group
    table[place, 0] = base
    table[place, 1] = (streams.cuts[pieces.tile + 1] - base) * group
    table[place, 2] = pieces.steps
    table[place, 3] = pieces.first
    table[place, 4] = pieces.partial - low
    table[place, 5] = low
    table[place, 6] = high
    table[place, 7] = pieces.direct
    table[place[:-1], 8] = np.where(head[1:], -1, place[1:])
    pages = pieces.first[:, None] * per_step + np.arange(per_step)
    table[place, RECORD : RECORD + per_step] = streams.words[pages]
    table[place, RECORD + per_step :] = streams.masks[pages]
    return table


def piece_tokens(streams: TileStreams, pieces: Pieces, page_size: int) -> Int32:
    """KV tokens that each piece reads."""
    loaded = np.append(0, np.cumsum(streams.words >> PAGE_BITS))
    per_step = STEP_TOKENS // page_size
    end = (pieces.first + pieces.steps) * per_step
    return (loaded[end] - loaded[pieces.first * per_step]).astype(np.int32)


__all__ = ["TILE_ROWS", "Pieces", "divide", "piece_tokens", "records"]
