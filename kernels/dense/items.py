"""Items of the dense kernel: tiles and heads dealt out to CTAs, and tiles divided where few."""

from typing import NamedTuple

import numpy as np

from stemserve.kernels.dense.tables import ITEM_FIELDS, TILE_FIELDS
from stemserve.kernels.dense.tiles import longest_first, steps
from stemserve.kernels.layout import Int32, int32

# In steps of one block, as measured on an H200 (1.7 us): what an item costs beside its blocks, and
# the launch of the merge.
ITEM_STEPS = 3
MERGE_STEPS = 4
PIECES = (1, 2, 3, 4, 5, 6, 8, 11, 16)  # of the longest tile
LEAST_GAIN = 0.05
MOST_WAVES = 3  # more items fill the device well enough


class Division(NamedTuple):
    tiles: Int32  # [tiles, TILE_FIELDS], longest first
    partial_rows: int  # after the rows of the step
    targets: Int32  # [merged rows]
    parts: Int32  # [merged rows, most pieces] rows that are merged; -1: none


def undivided(tiles: Int32) -> Division:
    """Every tile read by one CTA to its end; nothing to merge."""
    return Division(tiles, 0, np.empty(0, np.int32), np.empty((0, 1), np.int32))


def divide(
    tiles: Int32,  # [tiles, TILE_FIELDS], longest first
    num_rows: int,  # of the step
    query_heads: int,
    ctas: int,
) -> Division:
    """Cut long tiles between blocks where whole ones would leave CTAs idle."""
    if not len(tiles) or len(tiles) * query_heads > MOST_WAVES * ctas:
        return undivided(tiles)
    longest = int(steps(tiles).max())
    limits = sorted({-(-longest // pieces) for pieces in PIECES}, reverse=True)
    found = [(_makespan(_pieces(tiles, limit), query_heads, ctas), limit) for limit in limits]
    least, limit = min(found)
    if least + MERGE_STEPS > (1 - LEAST_GAIN) * found[0][0]:
        return undivided(tiles)
    return _merged(tiles, _counts(tiles, limit), num_rows)


def item_table(tiles: Int32, query_heads: int, ctas: int) -> Int32:  # [ctas, items, ITEM_FIELDS]
    """Long items first, dealt out to and fro: nearly equal shares."""
    items = len(tiles) * query_heads
    item = np.arange(items)
    lane, place = _deal(items, ctas)
    table = np.zeros((ctas, -(-items // ctas), ITEM_FIELDS), np.int32)
    table[lane, place, :TILE_FIELDS] = tiles[item // query_heads]
    table[lane, place, TILE_FIELDS] = item % query_heads
    return table


def _deal(items: int, ctas: int) -> tuple[Int32, Int32]:
    """CTA of each item, and its place there."""
    place, lane = np.divmod(np.arange(items, dtype=np.int32), np.int32(ctas))
    return int32(np.where(place % 2 == 0, lane, ctas - 1 - lane)), int32(place)


def _counts(tiles: Int32, limit: int) -> Int32:
    """Pieces of each tile, none of them empty; its own blocks stay together."""
    total, own = steps(tiles), tiles[:, 5]
    most = np.where(own > 0, total // np.maximum(own, 1), total)
    return int32(np.clip(-(-total // limit), 1, most))


def _pieces(tiles: Int32, limit: int) -> Int32:
    """Tiles cut into pieces of at most about `limit` blocks, without places for their results."""
    return _cut(tiles, _counts(tiles, limit))


def _cut(tiles: Int32, counts: Int32) -> Int32:
    tile = np.repeat(np.arange(len(tiles)), counts)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    number, shared, total = counts[tile], tiles[tile, 3], steps(tiles)[tile]
    start = np.minimum(piece * total // number, shared)
    stop = np.minimum((piece + 1) * total // number, shared)
    is_last = piece + 1 == number
    cut = tiles[tile]
    cut[:, 2] += int32(start)
    cut[:, 3] = np.where(is_last, shared, stop) - start
    cut[:, 5] = np.where(is_last, cut[:, 5], 0)
    return cut


def _makespan(tiles: Int32, query_heads: int, ctas: int) -> float:
    """Steps of the busiest CTA."""
    costs = np.repeat(np.sort(steps(tiles))[::-1] + ITEM_STEPS, query_heads)
    lane, _ = _deal(len(costs), ctas)
    return float(np.bincount(lane, weights=costs).max())


def _merged(tiles: Int32, counts: Int32, num_rows: int) -> Division:
    cut = _cut(tiles, counts)
    rows = tiles[:, 1]
    size = np.where(counts > 1, rows * counts, 0)
    base = num_rows + np.cumsum(size) - size
    tile = np.repeat(np.arange(len(tiles)), counts)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut[:, 6] = np.where(counts[tile] > 1, base[tile] + piece * rows[tile], cut[:, 6])
    owner = np.repeat(np.arange(len(tiles)), np.where(counts > 1, rows, 0))
    split_rows = np.where(counts > 1, rows, 0)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(split_rows) - split_rows, split_rows)
    pieces = np.arange(int(counts.max()))
    parts = (base[owner] + place)[:, None] + pieces * rows[owner][:, None]
    return Division(
        tiles=cut[longest_first(cut)],
        partial_rows=int(size.sum()),
        targets=int32(tiles[owner, 0] + place),
        parts=int32(np.where(pieces < counts[owner][:, None], parts, -1)),
    )
