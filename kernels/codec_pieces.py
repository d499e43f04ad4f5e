"""Division of the tiles' streams into pieces for the CTAs, and the merge of their results."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec_streams import TileStreams
from stemserve.kernels.codec_tiles import PAGE_BITS, STEP_TOKENS, TILE_ROWS
from stemserve.kernels.layout import Int32

PIECE_STEPS = 128 / STEP_TOKENS  # what a piece costs beside its steps, in steps (H200)
SLACK_STEPS = 0.7  # by which a bin may exceed the mean with further pieces' costs
MERGE_STEPS = 128 / STEP_TOKENS  # what a merge costs, and for each MERGE_ROWS rows
MERGE_ROWS = 512  # rows times group
RECORD = 16  # fields of a piece record before its first pages; see `records`


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


Wide = list[tuple[int, int]]  # steps of a wide region, tiles that read it
Cut = tuple[int, int, int, int]  # bin, tile, first step in its stream, steps
WideCut = tuple[int, int, int, int, int]  # bin, region, first step in it, steps, which tile


def _cut_wide(wide: Wide, most: int) -> list[WideCut]:
    """Cut each wide region alike for all its tiles, a bin a piece of at most `most` steps."""
    pieces: list[WideCut] = []
    for region, (steps, tiles) in enumerate(wide):
        cuts = -(-steps // most)
        for cut in range(cuts):
            start, stop = cut * steps // cuts, (cut + 1) * steps // cuts
            owner = len(pieces)
            pieces += [(owner + tile, region, start, stop - start, tile) for tile in range(tiles)]
    return pieces


def _cut_streams(streams: list[int], room: list[tuple[float, int]]) -> list[Cut] | None:
    """Fill the bins (room in steps, bin) with the tiles' streams in turn; None if they are full."""
    pieces: list[Cut] = []
    bins = iter(room)
    left, owner = 0.0, -1
    for tile, steps in enumerate(streams):
        start = 0
        while start < steps:
            rest = steps - start
            if left < 2 and left < rest:
                left, owner = next(bins, (0.0, -1))
                if owner < 0:
                    return None
                continue
            take = min(rest, int(left))
            if rest - take == 1 and take > 2:
                take -= 1  # no piece of one step
            pieces.append((owner, tile, start, take))
            left -= take + PIECE_STEPS
            start += take
    return pieces


def _whole_tiles(streams: list[int], bins: int) -> tuple[list[Cut], float]:
    """Longest first, each tile to the emptiest bin; the pieces and the cost of the fullest bin."""
    heap = [(0.0, owner) for owner in range(bins)]
    pieces: list[Cut] = []
    for tile in sorted(range(len(streams)), key=lambda tile: -streams[tile]):
        if streams[tile]:
            load, owner = heapq.heappop(heap)
            pieces.append((owner, tile, 0, streams[tile]))
            heapq.heappush(heap, (load + streams[tile] + PIECE_STEPS, owner))
    return pieces, max(load for load, _ in heap) - PIECE_STEPS


def _even_pieces(wide: Wide, streams: list[int], bins: int) -> tuple[list[WideCut], list[Cut]]:
    """Pieces of the wide regions and of the streams, such that the fullest bin holds least."""
    total = sum(streams) + sum(steps * tiles for steps, tiles in wide)
    most = max(2, -(-total // bins))
    while True:
        of_wide = _cut_wide(wide, most)
        free = bins - len(of_wide)
        if free * most + sum(most - piece[3] for piece in of_wide) >= sum(streams):
            room = [(most + SLACK_STEPS, bins - 1 - place) for place in range(free)]
            left = most + SLACK_STEPS - PIECE_STEPS
            room += [(left - piece[3], piece[0]) for piece in of_wide]
            of_streams = _cut_streams(streams, [entry for entry in room if entry[0] >= 1])
            if free >= 0 and of_streams is not None:
                return of_wide, of_streams
        most += 1 + most // 256


def _share(wide: Wide, streams: list[int], rows: int, bins: int) -> tuple[list[WideCut], list[Cut]]:
    """Even pieces, or whole tiles where the merge that they save is worth their uneven loads."""
    of_wide, of_streams = _even_pieces(wide, streams, bins)
    if wide or 5 * len(streams) < 3 * bins:
        return of_wide, of_streams
    load = [-PIECE_STEPS] * bins
    for owner, _, _, steps in of_streams:
        load[owner] += steps + PIECE_STEPS
    whole, cost = _whole_tiles(streams, bins)
    even_cost = max(load) + MERGE_STEPS * (1 + rows / MERGE_ROWS)
    return [], whole if cost <= even_cost else of_streams


def _row_ranges(
    streams: TileStreams, first: Int32, steps: Int32, per_step: int
) -> tuple[Int32, Int32]:
    """Rows that the stream pieces change: the union over the runs that each covers."""
    narrow = slice(streams.num_wide, None)
    page, low, high = streams.run_page[narrow], streams.run_low[narrow], streams.run_high[narrow]
    pairs = np.empty(2 * len(first), np.int64)
    pairs[::2] = page.searchsorted(first * per_step, "right") - 1
    pairs[1::2] = page.searchsorted((first + steps) * per_step, "left")
    # The last pair may end at the array's end, which reduceat does not take as an index.
    lows = np.minimum.reduceat(np.concatenate([low, low[-1:]]), pairs)[::2]
    highs = np.maximum.reduceat(np.concatenate([high, high[-1:]]), pairs)[::2]
    return lows, highs


def divide(streams: TileStreams, group: int, page_size: int, bins: int) -> Pieces:
    """Pieces of about equal cost for `bins` CTAs, and the merge table of their partial results."""
    region_steps = (streams.region_step[1:] - streams.region_step[:-1]).tolist()
    narrow, cuts = streams.num_wide, streams.cuts
    first_tile = cuts.searchsorted(streams.wide_low, "right") - 1
    copies = cuts.searchsorted(streams.wide_high, "left") - first_tile
    wide = list(zip(region_steps[:narrow], copies.tolist(), strict=True))
    of_wide, of_streams = _share(wide, region_steps[narrow:], len(streams.rows) * group, bins)

    pieces = np.empty((6, len(of_wide) + len(of_streams)), np.int32)
    if of_wide:
        owner, region, start, length, copy = np.array(of_wide, np.int32).T
        tile = first_tile[region] + copy
        low = np.maximum(streams.wide_low[region], cuts[tile])
        high = np.minimum(streams.wide_high[region], cuts[tile + 1])
        first = streams.region_step[region] + start
        for row, values in enumerate((owner, tile, first, length, low, high)):
            pieces[row, : len(of_wide)] = values
    if of_streams:
        rest = pieces[:, len(of_wide) :]
        rest[:4] = np.array(of_streams, np.int32).T
        rest[2] += streams.region_step[narrow + rest[1]]
        rest[4], rest[5] = _row_ranges(streams, rest[2], rest[3], STEP_TOKENS // page_size)
    order = pieces[0].argsort(kind="stable")
    return _with_merge(pieces[:, order], len(streams.rows), group)


def _with_merge(pieces: Int32, rows: int, group: int) -> Pieces:
    owner, tile, first, steps, low, high = pieces
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
    page words and masks of the first step and the layout's row of each row, so that a CTA starts
    with one load.
    """
    head = np.ones(len(pieces.bin), np.bool_)
    head[1:] = pieces.bin[1:] != pieces.bin[:-1]
    place = np.where(head, pieces.bin, bins - 1 + np.cumsum(~head))
    per_tile = -(-TILE_ROWS // group)
    filled = np.zeros((len(place), RECORD + 2 * per_step + per_tile), np.int32)
    base = streams.cuts[pieces.tile]
    filled[:, 0] = base
    filled[:, 1] = (streams.cuts[pieces.tile + 1] - base) * group
    filled[:, 2] = pieces.steps
    filled[:, 3] = pieces.first
    filled[:, 5] = (pieces.low - base) * group
    filled[:, 6] = (pieces.high - base) * group
    filled[:, 4] = pieces.partial - filled[:, 5]
    filled[:, 7] = pieces.direct
    filled[:-1, 8] = np.where(head[1:], -1, place[1:])
    filled[-1:, 8] = -1
    pages = pieces.first[:, None] * per_step + np.arange(per_step)
    filled[:, RECORD : RECORD + per_step] = streams.words[pages]
    filled[:, RECORD + per_step : RECORD + 2 * per_step] = streams.masks[pages]
    rows = np.minimum(base[:, None] + np.arange(per_tile), len(streams.rows) - 1)
    filled[:, RECORD + 2 * per_step :] = streams.rows[rows]
    table = np.zeros((bins + len(place) - int(head.sum()), filled.shape[1]), np.int32)
    table[:, 8] = -1
    table[place] = filled
    return table


def piece_tokens(streams: TileStreams, pieces: Pieces, page_size: int) -> Int32:
    """KV tokens that each piece reads."""
    loaded = np.zeros(len(streams.words) + 1, np.int32)
    np.cumsum(streams.words >> PAGE_BITS, out=loaded[1:])
    per_step = STEP_TOKENS // page_size
    end = (pieces.first + pieces.steps) * per_step
    tokens: Int32 = loaded[end] - loaded[pieces.first * per_step]
    return tokens


__all__ = ["TILE_ROWS", "Pieces", "divide", "piece_tokens", "records"]
