"""The planner of the tree kernel in C: one call from a layout to the packed tables.

It does what rows, streams, pieces and pairs of this folder do, with the same tables bit
by bit.
"""

import ctypes
import threading
import weakref
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.c_library import load_library
from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.host_tables import Capacity, HostTables, section_starts
from stemserve.kernels.codec.pairs import Pairing
from stemserve.kernels.codec.pieces import Pieces
from stemserve.kernels.codec.streams import TileStreams
from stemserve.kernels.layout import AttentionLayout, Int32

FOLDER = Path(__file__).parent.parent / "csrc"
FILES = ("planner.c", "rows.c", "streams.c", "division.c", "pieces.c", "pairs.c")
SOURCES = [FOLDER / f"codec_{name}" for name in (*FILES, "planner.h", "division.h")]
FAILURES = {
    1: "memory is short",
    2: "the layout is not a forest with its pages and segments",
    3: "settings are out of their ranges",
    4: "the layout is too large: more than 2^24 pages or rows, or tables beyond 2^31 entries",
}


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parent", "indptr", "pages", "tokens")),
        *((name, ctypes.c_void_p) for name in ("segment_indptr", "segment_node", "is_item")),
        *((name, ctypes.c_int32) for name in ("page_size", "nodes", "num_pages", "segments")),
    ]


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("group", "bins", "window")),
        *((name, ctypes.c_int32) for name in ("split", "longest_first", "max_splits")),
        *((name, ctypes.c_int32) for name in ("piece", "merge", "slack", "wide")),
        *((name, ctypes.c_int32) for name in ("pair_wide", "least_steps")),
    ]


SIZES = (
    *("rows", "tiles", "wide", "runs", "places", "words", "windowed"),
    *("pieces", "columns", "records", "record_size", "partial_rows"),
    *("items", "merges", "paired", "total"),
)
RECORDS, RECORD_SIZE, MERGES, PAIRED = (
    SIZES.index(name) for name in ("records", "record_size", "merges", "paired")
)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """With the types of what it exports."""
    pointer = ctypes.c_void_p
    library.stemserve_planner_new.restype = pointer
    library.stemserve_planner_free.argtypes = [pointer]
    library.stemserve_planner_plan.argtypes = [pointer] * 4
    library.stemserve_planner_tables.argtypes = [pointer, pointer, ctypes.c_int64]
    library.stemserve_planner_pack.argtypes = [*[pointer] * 3, ctypes.c_int32, pointer]
    library.stemserve_planner_pack.restype = None
    return library


@cache
def planner_library() -> ctypes.CDLL:
    return declared(load_library(SOURCES))


def _address(array: NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]  # array.ctypes takes twice as long
    return address


class NativePlanner:
    """Memory of its own, which grows to the largest plan."""

    def __init__(
        self,
        group: int,
        bins: int,
        window: int,
        costs: PieceCosts,
        division: Division,
        pairing: Pairing | None = None,  # None: no bins are paired
    ) -> None:
        self._library = planner_library()
        self._handle: int = self._library.stemserve_planner_new()
        if not self._handle:
            raise MemoryError("no memory for a planner")
        weakref.finalize(self, self._library.stemserve_planner_free, self._handle)
        self._settings = _Settings(
            *(group, bins, window),
            *(division.split, division.longest_first, division.max_splits),
            *(costs.piece, costs.merge, costs.slack, costs.wide),
            *((pairing.wide, pairing.least_steps) if pairing else (0, 0)),
        )
        self._lock = threading.Lock()

    def plan(self, layout: AttentionLayout) -> HostTables:
        arrays = (
            *(layout.node_parent, layout.node_page_indptr, layout.node_pages, layout.node_tokens),
            *(layout.segment_indptr, layout.segment_node),
        )
        ints = [np.ascontiguousarray(array, np.int32) for array in arrays]
        items = np.ascontiguousarray(layout.segment_is_item, np.bool_)
        if len(ints[1]) != len(ints[0]) + 1 or len(ints[3]) != len(ints[0]):
            raise ValueError("the arrays of a layout's nodes differ in length")
        if len(ints[4]) != len(ints[5]) + 1 or len(items) != len(ints[5]):
            raise ValueError("the arrays of a layout's segments differ in length")
        given = _Layout(
            *(_address(array) for array in ints),
            _address(items),
            *(layout.page_size, len(ints[0]), len(ints[2]), len(items)),
        )
        sizes = np.empty(len(SIZES), np.int32)
        with self._lock:
            self._check(
                self._library.stemserve_planner_plan(
                    self._handle,
                    ctypes.addressof(given),
                    ctypes.addressof(self._settings),
                    _address(sizes),
                )
            )
            tables = np.empty(sizes[-1], np.int32)
            self._check(
                self._library.stemserve_planner_tables(self._handle, _address(tables), len(tables))
            )
        return _host_tables(layout, tables, sizes)

    def _check(self, status: int) -> None:
        if status:
            raise ValueError(f"tree decode cannot be planned: {FAILURES[status]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSections:
    """Sections side by side, in the order in which `stemserve_planner_tables` copies them."""

    tables: Int32
    sizes: Int32  # [SIZES]
    size: Capacity  # that holds them

    def streams(self) -> TileStreams:
        size = self._size()
        rows, places, words = size["rows"], size["places"], size["words"]
        windowed, wide = size["windowed"], size["wide"]
        section = _Cutter(self.tables)
        return TileStreams(
            rows=section(rows),
            cuts=section(size["tiles"] + 1),
            wide_low=section(wide),
            wide_high=section(wide),
            region_step=section(wide + size["tiles"] + 1),
            run_node=section(places),
            run_page=section(places),
            run_pages=section(places),
            run_low=section(places),
            run_high=section(places),
            words=section(words),
            masks=section(words),
            positions=section(words * windowed),
            starts=section(rows * windowed),
        )

    def pieces(self) -> Pieces:
        size = self._size()
        rows, pieces, columns = size["rows"], size["pieces"], size["columns"]
        after = rows + rows * columns + size["records"] * size["record_size"]
        section = _Cutter(self.tables, len(self.tables) - after - 9 * pieces)
        return Pieces(
            bin=section(pieces),
            tile=section(pieces),
            first=section(pieces),
            steps=section(pieces),
            low=section(pieces),
            high=section(pieces),
            direct=section(pieces).astype(np.bool_),
            partial=section(pieces),
            tokens=section(pieces),
            partial_rows=size["partial_rows"],
            merge_count=section(rows),
            merge=section(rows * columns).reshape(rows, columns),
        )

    def records(self) -> Int32:
        width = int(self.sizes[RECORD_SIZE])
        count = int(self.sizes[RECORDS])
        return self.tables[len(self.tables) - count * width :].reshape(count, width)

    def pack(self, capacity: Capacity, flat: Int32) -> None:
        starts = _starts(capacity, int(self.sizes[RECORD_SIZE]))
        if len(flat) < starts[-1] or not capacity.holds(self.size):
            raise ValueError(f"a plan of tree decode does not fit into {capacity}")
        planner_library().stemserve_planner_pack(
            _address(self.tables),
            _address(self.sizes),
            starts,
            capacity.columns,
            _address(flat),
        )

    def _size(self) -> dict[str, int]:
        return dict(zip(SIZES, self.sizes.tolist(), strict=True))


class _Cutter:
    """Takes one section after another."""

    def __init__(self, tables: Int32, place: int = 0) -> None:
        self._tables = tables
        self._place = place

    def __call__(self, count: int) -> Int32:
        self._place += count
        return self._tables[self._place - count : self._place]


@lru_cache(maxsize=256)
def _starts(capacity: Capacity, record: int) -> ctypes.Array[ctypes.c_int32]:
    starts = section_starts(capacity, record)
    return (ctypes.c_int32 * len(starts))(*starts)


def _host_tables(layout: AttentionLayout, tables: Int32, sizes: Int32) -> HostTables:
    counts = sizes.tolist()
    size = _capacity(counts)
    return HostTables(
        layout=layout,
        sections=NativeSections(tables=tables, sizes=sizes, size=size),
        size=size,
        merges=counts[MERGES] > 0,
        paired=counts[PAIRED] > 0,
    )


def _capacity(sizes: list[int]) -> Capacity:
    rows, _, _, _, _, words, windowed, _, columns, records, _, partial_rows, items, *_ = sizes
    return Capacity(
        rows=rows,
        records=records,
        pages=words,
        columns=columns,
        partial_rows=partial_rows,
        windowed=windowed > 0,
        items=items > 0,
    )
