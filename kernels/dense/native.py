"""The planner of cascade prefill in C: one call from a layout to the packed tables.

It does what streams, tiles and items of this folder do, with the same tables bit by bit.
"""

import ctypes
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.c_library import load_library
from stemserve.kernels.dense.packed import PackedPlan, PackedStage, place_tables
from stemserve.kernels.dense.plan import work_parts
from stemserve.kernels.dense.tables import BLOCK_FIELDS, ITEM_FIELDS, TILE_FIELDS
from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.kernels.strategy import Work

FOLDER = Path(__file__).parent.parent / "csrc"
FILES = ("planner.c", "streams.c", "tiles.c", "items.c", "planner.h")
FAILURES = {
    1: "memory is short",
    2: "the layout is not a forest with its pages and segments",
    3: "settings are out of their ranges",
    4: "the layout is too large: tables beyond 2^31 entries",
}
SIZES = (
    *("sources", "rows", "rounds", "blocks", "columns"),
    *("merged", "tiles", "partial_rows", "tokens_read", "total"),
)


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parent", "indptr", "pages", "tokens")),
        *((name, ctypes.c_void_p) for name in ("segment_indptr", "segment_node", "is_item")),
        *((name, ctypes.c_int32) for name in ("page_size", "nodes", "num_pages", "segments")),
    ]


class _Settings(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("query_heads", "ctas")]


@cache
def dense_library() -> ctypes.CDLL:
    library = load_library([FOLDER / f"dense_{name}" for name in FILES])
    library.stemserve_dense_new.restype = ctypes.c_void_p
    library.stemserve_dense_free.argtypes = [ctypes.c_void_p]
    library.stemserve_dense_plan.argtypes = [ctypes.c_void_p] * 4
    library.stemserve_dense_tables.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _address(array: NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]  # array.ctypes takes twice as long
    return address


class NativeDense:
    """Memory of its own, which grows to the largest plan."""

    def __init__(self, query_heads: int, ctas: int) -> None:
        self._library = dense_library()
        self._handle: int = self._library.stemserve_dense_new()
        if not self._handle:
            raise MemoryError("no memory for a planner")
        weakref.finalize(self, self._library.stemserve_dense_free, self._handle)
        self._ctas = ctas
        self._settings = _Settings(query_heads, ctas)
        self._lock = threading.Lock()

    def plan(self, layout: AttentionLayout) -> PackedPlan:
        """Raises ValueError where the layout is not one, MemoryError where memory is short."""
        ints, is_item = _arrays(layout)
        given = _Layout(
            *(_address(array) for array in ints),
            _address(is_item),
            *(layout.page_size, len(ints[0]), len(ints[2]), len(is_item)),
        )
        with self._lock:
            sizes, joined = self._tables(given)
        return _packed(joined, dict(zip(SIZES, sizes, strict=True)), self._ctas)

    def _tables(self, given: _Layout) -> tuple[list[int], Int32]:
        """SIZES, and the tables side by side. The planner holds one plan at a time."""
        found = np.empty(len(SIZES), np.int32)
        self._check(
            self._library.stemserve_dense_plan(
                self._handle,
                ctypes.addressof(given),
                ctypes.addressof(self._settings),
                _address(found),
            )
        )
        joined = np.empty(found[-1], np.int32)
        self._check(
            self._library.stemserve_dense_tables(self._handle, _address(joined), len(joined))
        )
        return found.tolist(), joined

    def _check(self, status: int) -> None:
        if status == 1:
            raise MemoryError(FAILURES[1])
        if status:
            raise ValueError(FAILURES[status])


def _arrays(layout: AttentionLayout) -> tuple[list[Int32], NDArray[np.bool_]]:
    """What `_Layout` points to, in its order; kept by the caller while C reads it."""
    arrays = (
        *(layout.node_parent, layout.node_page_indptr, layout.node_pages, layout.node_tokens),
        *(layout.segment_indptr, layout.segment_node),
    )
    ints = [np.ascontiguousarray(array, np.int32) for array in arrays]
    is_item = np.ascontiguousarray(layout.segment_is_item, np.bool_)
    if len(ints[1]) != len(ints[0]) + 1 or len(ints[3]) != len(ints[0]):
        raise ValueError("the arrays of a layout's nodes differ in length")
    if len(ints[4]) != len(ints[5]) + 1 or len(is_item) != len(ints[5]):
        raise ValueError("the arrays of a layout's segments differ in length")
    return ints, is_item


def _packed(joined: Int32, size: Mapping[str, int], ctas: int) -> PackedPlan:
    """`size` by the names of SIZES."""
    shapes: list[tuple[int, ...]] = [
        *((size["sources"],), (size["rows"],), (size["rows"],)),
        (ctas, size["rounds"], ITEM_FIELDS),
        (size["blocks"], BLOCK_FIELDS),
        (size["merged"], size["columns"]),
        (size["merged"],),
        (size["tiles"], TILE_FIELDS),
    ]
    sources, first, seen, items, blocks, parts, targets, tiles = place_tables(shapes)
    copied, read = size["sources"], (size["partial_rows"], size["tokens_read"])

    def work() -> Work:
        stages = [(tiles.host(joined), *read)] if tiles.shape[0] else []
        return Work(parts=tuple(work_parts(copied, stages)))

    stage = PackedStage(items=items, blocks=blocks, parts=parts, targets=targets)
    return PackedPlan(
        joined=joined,
        sources=sources,
        row_first=first,
        row_seen=seen,
        stages=[stage] if size["tiles"] else [],
        partial_rows=size["partial_rows"],
        make_work=work,
    )
