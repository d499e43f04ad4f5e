"""The planner of the tree kernel in C: one call from a layout to the packed tables.

It does what codec_rows, codec_streams and codec_pieces do, with the same tables bit by bit.
"""

import ctypes
import threading
import weakref
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.c_library import load_library
from stemserve.kernels.codec_division import Division, PieceCosts
from stemserve.kernels.codec_pieces import Pieces
from stemserve.kernels.codec_streams import TileStreams
from stemserve.kernels.codec_tables import HostTables
from stemserve.kernels.codec_tiles import STEP_TOKENS
from stemserve.kernels.layout import AttentionLayout, Int32

FOLDER = Path(__file__).parent / "csrc"
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
    ]


class _Pairing(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("records", "words", "masks")),
        *((name, ctypes.c_int32) for name in ("count", "size", "bins", "per_step", "wide_end")),
        ("table", ctypes.c_void_p),
    ]


SIZES = (
    *("rows", "tiles", "wide", "runs", "places", "words", "windowed"),
    *("pieces", "columns", "records", "record_size", "partial_rows", "items", "merges", "total"),
)


@cache
def planner_library() -> ctypes.CDLL:
    library = load_library(SOURCES)
    library.stemserve_planner_new.restype = ctypes.c_void_p
    library.stemserve_planner_free.argtypes = [ctypes.c_void_p]
    library.stemserve_planner_plan.argtypes = [ctypes.c_void_p] * 4
    library.stemserve_planner_tables.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.stemserve_pair_bins.argtypes = [ctypes.c_void_p]
    return library


def _address(array: NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]  # array.ctypes takes twice as long
    return address


class NativePlanner:
    """Memory of its own, which grows to the largest plan."""

    def __init__(
        self, group: int, bins: int, window: int, costs: PieceCosts, division: Division
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
        return _host_tables(layout, dict(zip(SIZES, sizes.tolist(), strict=True)), tables)

    def pair_bins(self, host: HostTables) -> Int32:
        """The records as `pair_bins` of codec_pairs orders them."""
        streams, records = host.streams, np.ascontiguousarray(host.records)
        table = np.empty_like(records)
        given = _Pairing(
            *(_address(array) for array in (records, streams.words, streams.masks)),
            *records.shape,
            self._settings.bins,
            STEP_TOKENS // host.layout.page_size,
            int(streams.region_step[streams.num_wide]),
            _address(table),
        )
        self._check(self._library.stemserve_pair_bins(ctypes.addressof(given)))
        return table

    def _check(self, status: int) -> None:
        if status:
            raise ValueError(f"tree decode cannot be planned: {FAILURES[status]}")


def _host_tables(layout: AttentionLayout, size: dict[str, int], tables: Int32) -> HostTables:
    """Views of the tables, which lie side by side."""
    place = 0

    def section(count: int) -> Int32:
        nonlocal place
        place += count
        return tables[place - count : place]

    rows, places, words, pieces = size["rows"], size["places"], size["words"], size["pieces"]
    windowed = size["windowed"]
    streams = TileStreams(
        rows=section(rows),
        cuts=section(size["tiles"] + 1),
        wide_low=section(size["wide"]),
        wide_high=section(size["wide"]),
        region_step=section(size["wide"] + size["tiles"] + 1),
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
    return HostTables(
        layout=layout,
        streams=streams,
        pieces=Pieces(
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
            merge=section(rows * size["columns"]).reshape(rows, size["columns"]),
        ),
        records=section(size["records"] * size["record_size"]).reshape(-1, size["record_size"]),
        items=size["items"] > 0,
        merges=size["merges"] > 0,
    )
