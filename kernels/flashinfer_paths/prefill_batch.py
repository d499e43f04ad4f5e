"""A batch of attention requests as FlashInfer reads it, and what it does not see by itself."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32, int32
from stemserve.kernels.token_sources import indptr, runs
from stemserve.kernels.torch_paths.packed_mask import PackedMask


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPositions:
    """Requests of [prefix | items]: a row at place p of its item, from 1, sees the prefix and the
    last p tokens up to itself. Place 0 would be a delimiter; there are none here.
    """

    prefix_tokens: NDArray[np.uint32]  # [requests]
    places: NDArray[np.uint16]  # [requests, most item rows]
    longest_item: NDArray[np.uint16]  # [requests]


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Requests, each with its rows and its tokens; the rows follow each other.

    The tokens of a request are in the pages of its block table, or without `pages` they follow
    those of the request before. A request without tokens has rows that see nothing; every other
    row sees a token, or `empty_rows` has it.
    """

    rows: Int32  # [requests], at least 1
    kv_tokens: Int32  # [requests]
    pages: Int32 | None  # block tables, one after the other
    page_size: int
    causal: bool  # the last row sees all tokens, each row before one less
    items: ItemPositions | None = None
    mask: PackedMask | None = None
    masked_rows: Int32 | None = None  # rows from which the mask hides everything

    @property
    def requests(self) -> int:
        return len(self.rows)

    @cached_property
    def row_indptr(self) -> Int32:
        return indptr(self.rows)

    @cached_property
    def kv_indptr(self) -> Int32:
        """Of pages, or of tokens without pages."""
        return indptr(self.kv_tokens if self.pages is None else self.page_counts)

    @cached_property
    def page_counts(self) -> Int32:
        return int32(-(-self.kv_tokens // self.page_size))

    @property
    def last_page_tokens(self) -> Int32:
        return int32(self.kv_tokens - np.maximum(self.page_counts - 1, 0) * self.page_size)

    @property
    def empty_rows(self) -> Int32:
        """Rows that see nothing."""
        blind = self.kv_tokens == 0
        rows = runs(self.row_indptr[:-1][blind], self.rows[blind])
        return rows if self.masked_rows is None else np.union1d(rows, self.masked_rows)


def seeing_requests(
    rows: Int32,  # [requests]
    kv_tokens: Int32,  # [requests]
) -> tuple[Int32, Int32]:
    """Causal requests, where those with more rows than tokens have their first rows apart."""
    blind = np.maximum(rows - kv_tokens, 0)
    if not blind.any():
        return rows, kv_tokens
    split_rows = np.stack([blind, rows - blind], axis=1).ravel()
    split_tokens = np.stack([np.zeros_like(kv_tokens), kv_tokens], axis=1).ravel()
    kept = split_rows > 0
    return split_rows[kept], split_tokens[kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTables:
    """A batch over a layout's rows, and the copy that it reads if it does not read the pool."""

    batch: PrefillBatch
    sources: Int32 | None = None  # of each token of the copy; None: pages are those of the pool
    row_order: Int32 | None = None  # [rows] layout rows in the order of the batch; None: the same

    @property
    def empty_rows(self) -> Int32:
        """The layout's rows that see nothing."""
        rows = self.batch.empty_rows
        return rows if self.row_order is None else self.row_order[rows]
