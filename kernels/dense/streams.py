"""Where each segment's keys lie: among the step's own rows, or in a copy of pages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stemserve.kernels.dense.tables import BLOCK_TOKENS
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.token_sources import EMPTY

# Fewer rows of a chunk are read from their pages: they would split the reads of others.
LEAST_FRESH_ROWS = 16


class Stretch(NamedTuple):
    """Tokens of a chain that lie together."""

    is_copied: bool
    start: int  # row of the step, or place in the copy
    tokens: int
    chain_start: int  # place in the chain of the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """A stream is what the segments of one node read beside their own rows."""

    stretches: list[list[Stretch]]  # of each stream
    segment_stream: Int32  # [segments], -1 for segments without rows
    segment_own: Int32  # [segments] rows at the end that see each other, causally, as rows
    sources: Int32  # of the copy; see token_sources

    def tokens(self, stream: int) -> int:
        return sum(stretch.tokens for stretch in self.stretches[stream])


class _Piece(NamedTuple):
    """Tokens low .. high of a node; they are rows from `row` on, or in pages."""

    node: int
    low: int
    high: int
    row: int | None


def own_rows(layout: AttentionLayout) -> Int32:
    """Rows of each segment that see each other where they are, before anything is stored."""
    rows, chain = layout.segment_rows, layout.chain_tokens
    is_fresh = (rows >= LEAST_FRESH_ROWS) | (rows >= chain)
    stored = np.where(is_fresh, np.minimum(rows, chain), 0)
    return int32(np.where(layout.segment_is_item, rows, stored))


def streams(layout: AttentionLayout) -> Streams:
    own = own_rows(layout)
    read = np.where(layout.segment_is_item, layout.chain_tokens, layout.chain_tokens - own)
    fresh = _fresh_tokens(layout, own)
    node = np.where(read > 0, layout.segment_node, -1)
    members = np.flatnonzero(layout.segment_rows > 0)
    keys = (node[members].astype(np.int64) << 32) + read[members]
    distinct, number = np.unique(keys, return_inverse=True)
    segment_stream = np.full(layout.num_segments, -1, np.int32)
    segment_stream[members] = number
    ends = zip((distinct >> 32).tolist(), (distinct & 0xFFFFFFFF).tolist(), strict=True)
    pieces = [list(_pieces(layout, end, tokens, fresh)) for end, tokens in ends]
    places = _CopyPlaces(layout, pieces)
    return Streams(
        stretches=[list(places.stretches(chain)) for chain in pieces],
        segment_stream=segment_stream,
        segment_own=own,
        sources=places.sources(),
    )


def _fresh_tokens(layout: AttentionLayout, own: Int32) -> dict[int, tuple[int, int]]:
    """By node: from which token on its tokens are rows of the step, and the row of that token."""
    fresh: dict[int, tuple[int, int]] = {}
    for segment in np.flatnonzero(~layout.segment_is_item & (own > 0)).tolist():
        begin = int(layout.chain_tokens[segment]) - int(own[segment])
        first_row = int(layout.segment_indptr[segment + 1]) - int(own[segment])
        node = int(layout.segment_node[segment])
        while node >= 0:
            start, tokens = int(layout.node_start[node]), int(layout.node_tokens[node])
            low = max(begin - start, 0)
            if low >= tokens and tokens:
                break
            if tokens and low < fresh.get(node, (tokens, 0))[0]:
                fresh[node] = (low, first_row + start + low - begin)
            node = int(layout.node_parent[node])
    return fresh


def _pieces(
    layout: AttentionLayout, node: int, tokens: int, fresh: dict[int, tuple[int, int]]
) -> Iterator[_Piece]:
    """The first `tokens` of a node's chain."""
    for member in layout.chain(node):
        held = min(int(layout.node_tokens[member]), tokens - int(layout.node_start[member]))
        low, row = fresh.get(member, (held, 0))
        if held > 0 and low > 0:
            yield _Piece(member, 0, min(low, held), None)
        if held > low:
            yield _Piece(member, low, held, row)


class _CopyPlaces:
    """Gives pages' tokens places in the copy; what all streams read together lies together."""

    def __init__(self, layout: AttentionLayout, chains: list[list[_Piece]]) -> None:
        self._layout = layout
        self._readers: dict[int, set[int]] = {}
        for stream, chain in enumerate(chains):
            for piece in chain:
                if piece.row is None:
                    self._readers.setdefault(piece.node, set()).add(stream)
        self._placed: dict[int, tuple[int, _Piece]] = {}
        self._size = 0
        # The longest reader of a run knows all of it.
        for chain in sorted(chains, key=lambda chain: -sum(p.high - p.low for p in chain)):
            self._place(chain)

    def stretches(self, chain: list[_Piece]) -> Iterator[Stretch]:
        open_stretch: Stretch | None = None
        for piece in chain:
            copied = piece.row is None
            start = self._placed[piece.node][0] if piece.row is None else piece.row
            tokens = piece.high - piece.low
            if open_stretch is not None:
                end = open_stretch.start + open_stretch.tokens
                if open_stretch.is_copied == copied and end == start:
                    open_stretch = open_stretch._replace(tokens=open_stretch.tokens + tokens)
                    continue
                yield open_stretch
            chain_start = int(self._layout.node_start[piece.node]) + piece.low
            open_stretch = Stretch(copied, start, tokens, chain_start)
        if open_stretch is not None:
            yield open_stretch

    def sources(self) -> Int32:
        layout, size = self._layout, self._layout.page_size
        sources = np.full(_whole_blocks(self._size), EMPTY, np.int32)
        for place, piece in self._placed.values():
            token = np.arange(piece.high, dtype=np.int32)
            slots = layout.pages(piece.node)[token // size] * size + token % size
            sources[place : place + piece.high] = slots
        return sources

    def _place(self, chain: list[_Piece]) -> None:
        above: _Piece | None = None
        for piece in chain:
            if piece.row is not None:
                above = None
                continue
            if piece.node not in self._placed:
                joins = above is not None and self._readers[above.node] == self._readers[piece.node]
                place = self._size if joins else _whole_blocks(self._size)
                self._placed[piece.node] = (place, piece)
                self._size = place + piece.high
            above = piece


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
