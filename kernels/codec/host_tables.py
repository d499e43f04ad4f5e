"""A plan's tables on the host, how large they are, and how they lie in the device's buffer."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from stemserve.kernels.codec.pieces import Pieces, records
from stemserve.kernels.codec.streams import TileStreams
from stemserve.kernels.codec.tiles import STEP_TOKENS
from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.kernels.strategy import Part, Work

FEWEST_COLUMNS, COLUMN_STEP = 4, 8  # partial results of a row that a plan has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sizes that a captured graph fixes; a later plan that needs no more takes the same buffers."""

    rows: int
    records: int
    pages: int
    columns: int  # partial results of a row
    partial_rows: int
    windowed: bool
    items: bool  # some rows see rows of their own step

    def holds(self, other: "Capacity") -> bool:
        return (
            self.rows == other.rows
            and self.windowed == other.windowed
            and self.records >= other.records
            and self.pages >= other.pages
            and self.columns >= other.columns
            and self.partial_rows >= other.partial_rows
            and self.items >= other.items
        )


class Sections(Protocol):
    """The parts of a plan's tables, in whatever memory they were made."""

    def streams(self) -> TileStreams: ...

    def pieces(self) -> Pieces: ...

    def records(self) -> Int32: ...  # [records, entries of one]

    def pack(self, capacity: Capacity, flat: Int32) -> None:
        """Write what the device reads into `flat`, of `table_size(capacity)` entries or more: see
        `section_starts`. The capacity holds the plan."""
        ...


@dataclass(frozen=True, kw_only=True)
class HostTables:
    """A plan's tables on the host, before they go to the device."""

    layout: AttentionLayout
    sections: Sections
    size: Capacity
    merges: bool
    paired: bool = False  # for the kernel of codec_hopper.cu; see pairs.py

    # A step's plan is packed and nothing else; who reads more of it waits for it.

    @cached_property
    def streams(self) -> TileStreams:
        return self.sections.streams()

    @cached_property
    def pieces(self) -> Pieces:
        return self.sections.pieces()

    @cached_property
    def records(self) -> Int32:
        return self.sections.records()


def host_work(host: HostTables) -> Work:
    pieces = host.pieces
    rows = pieces.high - pieces.low
    tree = Part(engine="tree", rows=rows, kv_tokens=pieces.tokens)
    if not host.merges:
        return Work(parts=(tree,))
    return Work(parts=(tree, Part(engine="merge", rows=rows, kv_tokens=np.zeros_like(rows))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySections:
    """As the planner in numpy makes them."""

    of_streams: TileStreams
    of_pieces: Pieces
    of_records: Int32  # [records, entries of one]

    def streams(self) -> TileStreams:
        return self.of_streams

    def pieces(self) -> Pieces:
        return self.of_pieces

    def records(self) -> Int32:
        return self.of_records

    def pack(self, capacity: Capacity, flat: Int32) -> None:
        pieces, streams = self.of_pieces, self.of_streams
        rows, record, merge_count, merge, positions, starts, words, masks = (
            flat[a:b] for a, b in pairwise(section_starts(capacity, self.of_records.shape[1]))
        )
        wide = merge[: capacity.rows * capacity.columns].reshape(capacity.rows, capacity.columns)
        wide[:, : pieces.merge.shape[1]] = pieces.merge
        wide[:, pieces.merge.shape[1] :] = -1
        for section, part in (
            (rows, streams.rows),
            (record, self.of_records.ravel()),
            (merge_count, pieces.merge_count),
            (positions, streams.positions),
            (starts, streams.starts),
            (words, streams.words),
            (masks, streams.masks),
        ):
            section[: len(part)] = part


def host_tables(
    layout: AttentionLayout, streams: TileStreams, pieces: Pieces, group: int, bins: int
) -> HostTables:
    table = records(streams, pieces, group, bins, STEP_TOKENS // layout.page_size)
    return HostTables(
        layout=layout,
        sections=ArraySections(of_streams=streams, of_pieces=pieces, of_records=table),
        size=Capacity(
            rows=len(streams.rows),
            records=len(table),
            pages=len(streams.words),
            columns=pieces.merge.shape[1],
            partial_rows=pieces.partial_rows,
            windowed=len(streams.starts) > 0,
            items=bool((streams.run_node < 0).any()),
        ),
        merges=bool((pieces.merge_count >= 0).any()),
    )


def with_room(size: Capacity) -> Capacity:
    """Room for later plans of the same rows: a quarter more, in coarse steps."""

    def more(count: int, step: int) -> int:
        return -(-(count + count // 4) // step) * step

    return Capacity(
        rows=size.rows,
        records=more(size.records, 16),
        pages=more(size.pages, 256),
        columns=more_columns(size.columns),
        partial_rows=more(size.partial_rows, 256),
        windowed=size.windowed,
        items=size.items,
    )


def more_columns(count: int) -> int:
    if count <= FEWEST_COLUMNS:
        return FEWEST_COLUMNS
    return -(-count // COLUMN_STEP) * COLUMN_STEP


@lru_cache(maxsize=256)
def section_starts(capacity: Capacity, record: int) -> tuple[int, ...]:
    """Where each section begins, and where the last one ends; `record`: entries of a record.

    Sections start at multiples of 64 entries, but the last part of each may be unused. Words and
    masks are the last ones: of these a plan may fill a small part only.
    """
    sizes = (
        capacity.rows,
        capacity.records * record,
        capacity.rows,
        capacity.rows * capacity.columns,
        capacity.pages if capacity.windowed else 0,
        capacity.rows if capacity.windowed else 0,
        capacity.pages,
        capacity.pages,
    )
    return tuple(accumulate((-(-size // 64) * 64 for size in sizes), initial=0))


def table_size(capacity: Capacity, record: int) -> int:
    return section_starts(capacity, record)[-1]
