"""Division of the tiles' streams into pieces for the CTAs, and the merge of their results."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.streams import TileStreams
from stemserve.kernels.codec.tiles import STEP_TOKENS, TILE_ROWS, loaded_tokens
from stemserve.kernels.layout import Int32

MERGE_ROWS = 512  # rows times group
LEAST_WIDE_STEPS = 4  # of a piece of a wide node
DEFAULT_COSTS, DEFAULT_DIVISION = PieceCosts(), Division()
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
    partial: Int32  # [pieces] first partial row (rows times group); no row of its own if direct
    tokens: Int32  # [pieces] KV tokens that it reads
    partial_rows: int
    merge_count: Int32  # [rows] partials of each row, -1: written by its only piece
    merge: Int32  # [rows, most partials] partial row of the first head of the group


Wide = list[tuple[int, int]]  # steps of a wide region, tiles that read it
Cut = tuple[int, int, int, int]  # bin, tile, first step in its stream, steps
WideCut = tuple[int, int, int, int, int]  # bin, region, first step in it, steps, which tile
Cuts = tuple[list[WideCut], list[Cut]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Divider:
    bins: int
    costs: PieceCosts
    division: Division

    def share(self, wide: Wide, streams: list[int], rows: int) -> Cuts:
        """Even pieces, or whole tiles where the merge that they save is worth uneven loads."""
        if not self.division.split:
            return [], self._whole_tiles(streams)[0]
        of_wide, of_streams = self._even_pieces(wide, streams)
        few = 5 * len(streams) < 3 * self.bins
        if wide or few or not self.division.longest_first:
            return of_wide, of_streams
        load = [-self.costs.piece] * self.bins
        for owner, _, _, steps in of_streams:
            load[owner] += steps * STEP_TOKENS + self.costs.piece
        merge = self.costs.merge * (MERGE_ROWS + rows) // MERGE_ROWS
        whole, cost = self._whole_tiles(streams)
        return [], whole if cost <= max(load) + merge else of_streams

    def _whole_tiles(self, streams: list[int]) -> tuple[list[Cut], int]:
        """Each tile to the emptiest bin, longest first; the pieces, and the fullest bin's cost.

        If not longest first, the bins take turns.
        """
        heap = [(0, owner) for owner in range(self.bins)]
        pieces: list[Cut] = []
        tiles = [tile for tile in range(len(streams)) if streams[tile]]
        if not self.division.longest_first:
            turns = [(i % self.bins, tile, 0, streams[tile]) for i, tile in enumerate(tiles)]
            return turns, 0
        for tile in sorted(tiles, key=lambda tile: -streams[tile]):
            load, owner = heapq.heappop(heap)
            pieces.append((owner, tile, 0, streams[tile]))
            load += streams[tile] * STEP_TOKENS + self.costs.piece
            heapq.heappush(heap, (load, owner))
        return pieces, max(load for load, _ in heap) - self.costs.piece

    def _even_pieces(self, wide: Wide, streams: list[int]) -> Cuts:
        """Pieces such that the fullest bin holds least: bisection, from what no division beats."""
        of_wide = self.costs.wide * sum(steps * tiles for steps, tiles in wide)
        total = sum(streams) + -(-of_wide // STEP_TOKENS)
        longest = -(-max(streams, default=0) // self.division.max_splits)
        low, width = max(2, -(-total // self.bins), longest), 1
        best = self._fitting(wide, streams, low)
        if best is not None:
            return best
        while best is None:  # `low` is too little
            best = self._fitting(wide, streams, low + width)
            low, width = (low + width, 2 * width) if best is None else (low, width)
        high = low + width
        while high - low > 1 + low // 256:
            middle = (low + high) // 2
            found = self._fitting(wide, streams, middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return best

    def _fitting(self, wide: Wide, streams: list[int], most: int) -> Cuts | None:
        """Pieces of about `most` steps a bin, or None if the bins do not hold them."""
        # Where two bins share what they read of a wide node, all bins read such nodes.
        spread = self.bins if self.costs.wide < STEP_TOKENS else 0
        of_wide = _cut_wide(wide, max(1, most * STEP_TOKENS // self.costs.wide), spread)
        free = self.bins - len(of_wide)
        spent = self.costs.wide * sum(piece[3] for piece in of_wide)
        if free < 0 or self.bins * most * STEP_TOKENS < sum(streams) * STEP_TOKENS + spent:
            return None
        full = most * STEP_TOKENS + self.costs.slack
        room = [(full, self.bins - 1 - place) for place in range(free)]
        room += [(full - self.costs.piece - p[3] * self.costs.wide, p[0]) for p in of_wide]
        of_streams = self._cut_streams(streams, [e for e in room if e[0] >= STEP_TOKENS])
        return None if of_streams is None else (of_wide, of_streams)

    def _cut_streams(self, streams: list[int], room: list[tuple[int, int]]) -> list[Cut] | None:
        """Fill the bins (room in tokens, bin) with the tiles' streams; None if they are full."""
        pieces: list[Cut] = []
        bins = iter(room)
        left, owner = 0, -1
        for tile, steps in enumerate(streams):
            start = 0
            while start < steps:
                rest = steps - start
                if left < 2 * STEP_TOKENS and left < rest * STEP_TOKENS:
                    left, owner = next(bins, (0, -1))
                    if owner < 0:
                        return None
                    continue
                take = min(rest, left // STEP_TOKENS)
                if rest - take == 1 and take > 2:
                    take -= 1  # no piece of one step
                pieces.append((owner, tile, start, take))
                left -= take * STEP_TOKENS + self.costs.piece
                start += take
        return pieces


def _cut_wide(wide: Wide, most: int, bins: int) -> list[WideCut]:
    """Cut each wide region alike for all its tiles, a bin a piece of at most `most` steps.

    There are more pieces than that needs, up to `bins`.
    """
    counts = [-(-steps // most) for steps, _ in wide]
    spare = bins - sum(cuts * tiles for cuts, (_, tiles) in zip(counts, wide, strict=True))
    while wide:
        longest = max(range(len(wide)), key=lambda region: wide[region][0] / counts[region])
        spare -= wide[longest][1]
        if spare < 0 or wide[longest][0] < LEAST_WIDE_STEPS * (counts[longest] + 1):
            break
        counts[longest] += 1
    pieces: list[WideCut] = []
    for region, (steps, tiles) in enumerate(wide):
        cuts = counts[region]
        for cut in range(cuts):
            start, stop = cut * steps // cuts, (cut + 1) * steps // cuts
            owner = len(pieces)
            pieces += [(owner + tile, region, start, stop - start, tile) for tile in range(tiles)]
    return pieces


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


def divide(
    streams: TileStreams,
    group: int,
    page_size: int,
    bins: int,
    costs: PieceCosts = DEFAULT_COSTS,
    division: Division = DEFAULT_DIVISION,
) -> Pieces:
    """Pieces of about equal cost for `bins` CTAs, and the merge table of their partial results."""
    region_steps = (streams.region_step[1:] - streams.region_step[:-1]).tolist()
    narrow, cuts = streams.num_wide, streams.cuts
    first_tile = cuts.searchsorted(streams.wide_low, "right") - 1
    copies = cuts.searchsorted(streams.wide_high, "left") - first_tile
    wide = list(zip(region_steps[:narrow], copies.tolist(), strict=True))
    divider = _Divider(bins=bins, costs=costs, division=division)
    of_wide, of_streams = divider.share(wide, region_steps[narrow:], len(streams.rows) * group)

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
    return with_merge(streams, pieces[:, order], group, page_size)


def with_merge(
    streams: TileStreams,
    pieces: Int32,  # [6, pieces]: bin, tile, first step, steps, first row, row after the last
    group: int,  # query heads of a KV head
    page_size: int,
) -> Pieces:
    """Give pieces the places of their results, and rows of several the places to merge."""
    owner, tile, first, steps, low, high = pieces
    rows = len(streams.rows)
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
        tokens=_piece_tokens(streams, first, steps, page_size),
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


def _piece_tokens(streams: TileStreams, first: Int32, steps: Int32, page_size: int) -> Int32:
    loaded = np.zeros(len(streams.words) + 1, np.int32)
    np.cumsum(loaded_tokens(streams.words), out=loaded[1:])
    per_step = STEP_TOKENS // page_size
    tokens: Int32 = loaded[(first + steps) * per_step] - loaded[first * per_step]
    return tokens
