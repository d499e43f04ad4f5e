"""Plans whose results do not depend on the batch: pieces end at fixed tokens of each row's chain.

A step of the kernel's loop holds 64 tokens at a multiple of 64 of one chain, so that a row meets
its tokens in the same steps, at the same places, whatever else is read; what a row does not see
adds exact zeros. Its partial results belong to runs of `fixed_split` tokens of its chain (and of
its own rows, if it is an item's), and are merged in that order.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec.rows import RowUnits, counted, node_ranges
from stemserve.kernels.codec.tiles import STEP_TOKENS
from stemserve.kernels.layout import AttentionLayout, Int32

OWN_CHUNKS = 1 << 24  # own rows come after all stored chunks
ALL_ROWS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSteps:
    """Steps of chains, and the rows that see some of their tokens."""

    node: Int32  # [steps] the chain ends in it; -1: own rows
    begin: Int32  # [steps] first token, in the chain or among own rows
    end: Int32  # [steps] token after the last that is loaded
    chunk: Int32  # [steps] which partial result of a row it belongs to
    base: Int32  # [steps] row that sees the first `visible` tokens, and each row after it one more
    visible: Int32  # [steps] -1: all rows see all tokens
    own: Int32  # [steps] the layout's row of own token 0
    low: Int32  # [steps] rows
    high: Int32  # [steps]

    def chosen(self, which: NDArray[np.integer], **changed: Int32) -> "ChainSteps":
        """Some steps, by their numbers, with some of their fields changed."""
        kept = {f.name: getattr(self, f.name)[which] for f in fields(self)}
        return ChainSteps(**kept | changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Pieces of at most so many steps: some rows of a tile, and what they see of a chunk."""

    steps: ChainSteps  # of all pieces, piece after piece
    piece: Int32  # [steps]
    tile: Int32  # [pieces]
    low: Int32  # [pieces] rows
    high: Int32  # [pieces]


def chain_steps(
    layout: AttentionLayout,
    tokens: int,  # of a chunk
    units: RowUnits,  # of the layout, ordered
    chains: Int32,  # [depth, units] nodes, root first; -1: none
) -> ChainSteps:
    """The steps of all chains, in chunks."""
    indptr = np.append(np.int32(0), np.cumsum(units.rows, dtype=np.int32))
    parts = [*_whole_steps(layout, units, chains, indptr), _partial_steps(layout, units, indptr)]
    stored = [part | {"chunk": part["begin"] // tokens} for part in parts]
    own = _own_steps(units, indptr)
    own |= {"chunk": OWN_CHUNKS + own["begin"] // tokens}
    names = [field.name for field in fields(ChainSteps)]
    empty = np.empty(0, np.int32)
    joined = {
        name: np.concatenate([empty, *(part[name] for part in [*stored, own])]).astype(np.int32)
        for name in names
    }
    return ChainSteps(**joined)


def _whole_steps(
    layout: AttentionLayout, units: RowUnits, chains: Int32, indptr: Int32
) -> list[dict[str, NDArray[np.integer]]]:
    """Steps that all their rows see to the end.

    A full step belongs to the node of its last token and all rows below; what is left at the end
    of a chain, to the rows whose chain ends there.
    """
    nodes = layout.num_nodes
    node, low, high = node_ranges(chains)
    partial = np.bincount(units.node[units.partial], minlength=nodes)[node]
    direct = np.bincount(units.node[units.node >= 0], minlength=nodes)[node]
    rest, inner, stop = indptr[low + partial], indptr[low + direct], indptr[high]
    start = layout.node_start[node]
    end = start + layout.node_tokens[node]
    first, full = start // STEP_TOKENS, end // STEP_TOKENS
    owner, step = counted(np.where(rest < stop, full - first, 0))
    begin = (first[owner] + step) * STEP_TOKENS
    tail = np.flatnonzero((rest < inner) & (end % STEP_TOKENS > 0))

    def seen_by_all(
        owner: NDArray[np.integer], **columns: NDArray[np.integer]
    ) -> dict[str, NDArray[np.integer]]:
        none = np.full(len(owner), -1, np.int32)
        same: dict[str, NDArray[np.integer]] = {
            "node": node[owner],
            "base": none,
            "visible": none,
            "own": none,
        }
        return same | {"low": rest[owner]} | columns

    return [
        seen_by_all(owner, begin=begin, end=begin + STEP_TOKENS, high=stop[owner]),
        seen_by_all(tail, begin=full[tail] * STEP_TOKENS, end=end[tail], high=inner[tail]),
    ]


def _partial_steps(
    layout: AttentionLayout, units: RowUnits, indptr: Int32
) -> dict[str, NDArray[np.integer]]:
    """Steps that end in the node in which a partial unit's rows end."""
    unit = np.flatnonzero(units.partial)
    first = layout.node_start[units.node[unit]] // STEP_TOKENS
    last = units.visible[unit] + units.rows[unit] - 1
    owner, step = counted(-(-last // STEP_TOKENS) - first)
    begin = (first[owner] + step) * STEP_TOKENS
    of = unit[owner]
    return {
        "node": units.node[of],
        "begin": begin,
        "end": np.minimum(begin + STEP_TOKENS, last[owner]),
        "base": indptr[of],
        "visible": units.visible[of],
        "own": np.full(len(of), -1, np.int32),
        "low": indptr[of] + np.maximum(0, begin - units.visible[of] + 1),
        "high": indptr[of + 1],
    }


def _own_steps(units: RowUnits, indptr: Int32) -> dict[str, NDArray[np.integer]]:
    unit = np.flatnonzero(units.is_item)
    owner, step = counted(-(-units.rows[unit] // STEP_TOKENS))
    of, begin = unit[owner], step * STEP_TOKENS
    return {
        "node": np.full(len(of), -1, np.int32),
        "begin": begin,
        "end": np.minimum(begin + STEP_TOKENS, units.rows[of]),
        "base": indptr[of],
        "visible": np.ones(len(of), np.int32),
        "own": units.row[of],
        "low": indptr[of] + begin,
        "high": indptr[of + 1],
    }


def row_groups(
    steps: ChainSteps,
    cuts: Int32,  # [tiles + 1] rows at which tiles begin
    limit: int,  # steps of a piece
) -> RowGroups:
    """Cut the steps at tiles and chunks, and where rows have more than `limit` steps, at rows."""
    steps, tile = _in_tiles(steps, cuts)
    order = np.lexsort((steps.begin, steps.low, steps.chunk, tile))
    changes = (np.diff(tile[order]) != 0) | (np.diff(steps.chunk[order]) != 0)
    starts = np.flatnonzero(np.append(len(order) > 0, changes)).tolist()
    parts: list[NDArray[np.intp]] = []
    ranges: list[tuple[int, int]] = []
    for start, stop in pairwise([*starts, len(order)]):
        members = order[start:stop]
        if stop - start <= limit:
            parts.append(members)
            ranges.append((0, ALL_ROWS))
            continue
        for rows, chosen in _row_cuts(steps.low[members], steps.high[members], limit):
            parts.append(members[chosen])
            ranges.append(rows)
    which = np.concatenate([np.empty(0, np.intp), *parts])
    piece = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    bounds = np.array(ranges, np.int32).reshape(-1, 2)
    low = np.maximum(steps.low[which], bounds[piece, 0])
    high = np.minimum(steps.high[which], bounds[piece, 1])
    first = np.flatnonzero(np.append(len(piece) > 0, np.diff(piece) != 0))
    return RowGroups(
        steps=steps.chosen(which, low=low, high=high),
        piece=piece,
        tile=tile[which[first]].astype(np.int32),
        low=np.minimum.reduceat(low, first) if len(first) else low,
        high=np.maximum.reduceat(high, first) if len(first) else high,
    )


def _in_tiles(steps: ChainSteps, cuts: Int32) -> tuple[ChainSteps, NDArray[np.integer]]:
    first = cuts.searchsorted(steps.low, "right") - 1
    owner, step = counted(cuts.searchsorted(steps.high, "left") - first)
    tile = first[owner] + step
    low = np.maximum(steps.low[owner], cuts[tile])
    high = np.minimum(steps.high[owner], cuts[tile + 1])
    return steps.chosen(owner, low=low, high=high), tile


def _row_cuts(
    low: Int32, high: Int32, limit: int
) -> Iterator[tuple[tuple[int, int], slice | NDArray[np.intp]]]:
    """Ranges of rows with at most `limit` steps each, and these; no row has more.

    The steps come in the order of `low`.
    """
    bounds = np.unique(np.concatenate([low, high]))
    begun: list[int] = low.searchsorted(
        bounds, "left"
    ).tolist()  # steps that begin before each bound
    ended: list[int] = np.sort(high).searchsorted(bounds, "right").tolist()
    rows: list[int] = bounds.tolist()
    start = 0
    while start < len(rows) - 1:
        stop = max(start + 1, bisect_right(begun, limit + ended[start]) - 1)
        first, after = begun[start], begun[stop]
        if first == ended[start]:
            yield (rows[start], rows[stop]), slice(first, after)
        else:  # some steps go on from rows before
            carried = np.flatnonzero(high[:first] > rows[start])
            yield (rows[start], rows[stop]), np.append(carried, np.arange(first, after))
        start = stop
