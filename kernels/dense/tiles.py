"""Tiles of rows and the blocks of tokens that each reads: what the dense kernel works through."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.dense.streams import Streams
from stemserve.kernels.dense.tables import (
    BLOCK_FIELDS,
    BLOCK_TOKENS,
    COPIED,
    MASKED,
    OWN,
    TILE_FIELDS,
    TILE_ROWS,
)
from stemserve.kernels.layout import AttentionLayout, Int32, int32

# Tiles of a longer segment share its blocks, and do not share a tile with others' rows.
MOST_PACKED_ROWS = 1024
# A block that nobody sees, for tiles that see nothing.
_NOTHING: Int32 = np.array([[0, 0, 0, MASKED]], np.int32)


class RowTables(NamedTuple):
    first: Int32  # [rows] first row of the step that each sees; the next one: none
    seen: Int32  # [rows] tokens of the chain that each sees, beside these


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTables:
    tiles: Int32  # [tiles, TILE_FIELDS], longest first
    blocks: Int32  # [blocks, BLOCK_FIELDS]
    tokens_read: int  # each run of tokens once for all tiles that share it


class _Groups(NamedTuple):
    """Segments that follow each other and read one stream."""

    start: Int32  # first row
    stop: Int32
    stream: Int32
    is_long: NDArray[np.bool_]


def steps(tiles: Int32) -> Int32:  # [tiles] blocks of each
    return int32(tiles[:, 3] + tiles[:, 5])


def longest_first(tiles: Int32) -> Int32:  # [tiles] an order of them
    return int32(np.argsort(-steps(tiles), kind="stable"))


def row_tables(layout: AttentionLayout, streams: Streams) -> RowTables:
    rows, chain = layout.segment_rows, layout.chain_tokens
    segment = np.repeat(np.arange(layout.num_segments), rows)
    row = np.arange(layout.num_rows, dtype=np.int32)
    own = streams.segment_own[segment]
    stop = layout.segment_indptr[segment + 1]
    stepped = chain[segment] - stop + 1 + row  # of a stored segment's row that sees no rows
    fixed = chain - np.where(layout.segment_is_item, 0, streams.segment_own)
    return RowTables(
        first=int32(np.where(own > 0, stop - own, row + 1)),
        seen=int32(np.where(own > 0, fixed[segment], np.maximum(stepped, 0))),
    )


def tile_tables(
    layout: AttentionLayout,
    streams: Streams,
    rows: RowTables,
    segments: Int32,  # [segments] of the layout, ascending
    *,
    packed: bool,  # rows of several may share a tile
) -> TileTables:
    """The tiles of some segments, and the blocks of tokens that each reads."""
    builder = _Builder(streams, rows, _least_seen(layout, streams, rows))
    groups = _groups(layout, streams, segments, packed)
    for start, stop, stream in zip(*_where(groups, groups.is_long), strict=True):
        builder.add_long(int(start), int(stop), int(stream))
    builder.add_packed(*_where(groups, ~groups.is_long))
    return builder.tables()


def _where(groups: _Groups, chosen: NDArray[np.bool_]) -> tuple[Int32, Int32, Int32]:
    return groups.start[chosen], groups.stop[chosen], groups.stream[chosen]


def _least_seen(layout: AttentionLayout, streams: Streams, rows: RowTables) -> Int32:
    """Of the rows of each stream."""
    least = np.full(len(streams.stretches), np.iinfo(np.int32).max, np.int32)
    members = np.flatnonzero(layout.segment_rows > 0)
    # A later row of a segment sees no less.
    seen = rows.seen[layout.segment_indptr[members]]
    np.minimum.at(least, streams.segment_stream[members], seen)
    return least


def _groups(layout: AttentionLayout, streams: Streams, segments: Int32, packed: bool) -> _Groups:
    members = segments[layout.segment_rows[segments] > 0]
    start, stop = layout.segment_indptr[members], layout.segment_indptr[members + 1]
    stream, own = streams.segment_stream[members], streams.segment_own[members]
    is_long = (own > MOST_PACKED_ROWS) & (own == stop - start)
    opens = np.ones(len(members), np.bool_)
    if packed:
        alike = (stream[1:] == stream[:-1]) & (start[1:] == stop[:-1])
        opens[1:] = ~alike | is_long[1:] | is_long[:-1]
    closes = np.append(opens[1:], [True] * min(len(members), 1))
    return _Groups(start[opens], int32(stop[closes]), stream[opens], is_long[opens])


class _Builder:
    def __init__(self, streams: Streams, rows: RowTables, least_seen: Int32) -> None:
        self._streams = streams
        self._rows = rows
        self._least_seen = least_seen
        self._blocks: list[Int32] = [_NOTHING]
        self._num_blocks = 1
        self._tiles: list[Int32] = []
        self._shared: dict[int, tuple[int, int]] = {}  # of each stream: first block, blocks
        self._tokens_read = 0

    def tables(self) -> TileTables:
        tiles = np.concatenate([np.empty((0, TILE_FIELDS), np.int32), *self._tiles])
        return TileTables(
            tiles=tiles[longest_first(tiles)],
            blocks=np.concatenate(self._blocks),
            tokens_read=self._tokens_read,
        )

    def add_long(self, start: int, stop: int, stream: int) -> None:
        """A segment whose rows see each other: tile i sees i whole blocks of them, and its own."""
        tiles = -(-(stop - start) // TILE_ROWS)
        at = start + np.arange(tiles, dtype=np.int32) * TILE_ROWS
        none = np.zeros_like(at)
        above = self._stream_blocks(stream)
        first = self._append(
            np.concatenate([above, _records(at[:-1], none[:-1], none[:-1], none[:-1])])
        )
        last = self._append(_records(at, none, none, np.full_like(at, MASKED | OWN)))
        place = np.arange(tiles, dtype=np.int32)
        self._add_tiles(
            at,
            np.minimum(stop - at, TILE_ROWS),
            (none + first, len(above) + place),
            (last + place, none + 1),
        )
        self._tokens_read += self._streams.tokens(stream) + stop - start

    def add_packed(self, start: Int32, stop: Int32, stream: Int32) -> None:
        """Groups, each cut into tiles from its first row on."""
        if not len(start):
            return
        counts = -(-(stop - start) // TILE_ROWS)
        group = np.repeat(np.arange(len(start)), counts)
        place = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
        row = int32(start[group] + place * TILE_ROWS)
        rows = int32(np.minimum(stop[group] - row, TILE_ROWS))
        ranges = [self._stream_range(int(s)) for s in stream]
        shared = np.array(ranges, np.int32)[group]
        own_at, own_count = self._own_blocks(row, rows)
        blind = (shared[:, 1] + own_count) == 0
        own_at, own_count = np.where(blind, 0, own_at), np.where(blind, 1, own_count)
        self._add_tiles(row, rows, (shared[:, 0], shared[:, 1]), (own_at, own_count))
        self._tokens_read += sum(self._streams.tokens(int(s)) for s in stream)

    def _own_blocks(self, row: Int32, rows: Int32) -> tuple[Int32, Int32]:
        """Blocks of the step's rows that some row of each tile sees."""
        inside = row[:, None] + np.minimum(np.arange(TILE_ROWS), rows[:, None] - 1)
        first = self._rows.first[inside]
        sees = first <= inside
        low = np.where(sees, first, row[:, None] + TILE_ROWS).min(axis=1)
        counts = np.where(sees.any(axis=1), -(-(row + rows - low) // BLOCK_TOKENS), 0)
        tile = np.repeat(np.arange(len(row)), counts)
        place = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = low[tile] + place * BLOCK_TOKENS
        whole = (at + BLOCK_TOKENS <= row[tile]) & (first.max(axis=1)[tile] <= at)
        flags = np.where(whole, 0, MASKED | OWN)
        none = np.zeros_like(at)
        begin = self._append(_records(at, none, none, flags))
        self._tokens_read += int((row + rows - low)[counts > 0].sum())
        return int32(begin + np.cumsum(counts) - counts), int32(counts)

    def _stream_range(self, stream: int) -> tuple[int, int]:
        if stream not in self._shared:
            blocks = self._stream_blocks(stream)
            self._shared[stream] = (self._append(blocks), len(blocks))
        return self._shared[stream]

    def _stream_blocks(self, stream: int) -> Int32:
        least = self._least_seen[stream]
        found: list[Int32] = [np.empty((0, BLOCK_FIELDS), np.int32)]
        for stretch in self._streams.stretches[stream]:
            step = np.arange(0, stretch.tokens, BLOCK_TOKENS, dtype=np.int32)
            left = stretch.tokens - step
            place = stretch.chain_start + step
            masked = (left < BLOCK_TOKENS) | (place + BLOCK_TOKENS > least)
            flags = (COPIED if stretch.is_copied else 0) | np.where(masked, MASKED, 0)
            found.append(_records(stretch.start + step, place, left, flags))
        return np.concatenate(found)

    def _append(self, blocks: Int32) -> int:
        """Where they begin."""
        begin = self._num_blocks
        self._blocks.append(blocks)
        self._num_blocks += len(blocks)
        return begin

    def _add_tiles(
        self, row: Int32, rows: Int32, shared: tuple[Int32, Int32], own: tuple[Int32, Int32]
    ) -> None:
        self._tiles.append(int32(np.stack([row, rows, *shared, *own, row], axis=1)))


def _records(at: Int32, place: Int32, tokens: Int32, flags: Int32) -> Int32:
    return int32(np.stack([at, place, tokens, flags], axis=1))
