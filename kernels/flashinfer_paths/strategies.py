"""The strategies that are one batch of FlashInfer."""

import numpy as np

from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.flashinfer_paths.attention import (
    FlashInferAttention,
    FlashInferPlan,
)
from stemserve.kernels.flashinfer_paths.backends import Backend
from stemserve.kernels.flashinfer_paths.prefill_batch import BatchTables
from stemserve.kernels.flashinfer_paths.runtime import FlashInferRuntime
from stemserve.kernels.flashinfer_paths.tables import (
    naive_outline,
    naive_tables,
    pool_tables,
    ragged_tables,
)
from stemserve.kernels.flashinfer_paths.tree_tables import (
    custom_mask_outline,
    custom_mask_tables,
    multi_item_refusal,
    multi_item_tables,
)
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.custom_mask import MAX_MASK_BITS, request_rows, request_tokens
from stemserve.kernels.torch_paths.item_mask import item_mask, item_tiles
from stemserve.kernels.torch_paths.logical_request import logical_requests
from stemserve.kernels.torch_paths.multi_item import tree_refusal
from stemserve.kernels.torch_paths.packed_mask import PackedMask


class FlashInferNaive(FlashInferAttention):
    """Every segment over a contiguous copy of all that it sees, in one batch."""

    kernel = Kernel.NAIVE
    phase = Phase.PREFILL

    def refusal(self, layout: AttentionLayout) -> str | None:
        with_rows = layout.segment_rows > 0
        own = layout.segment_rows * layout.segment_is_item
        return self.scratch_refusal(int((layout.chain_tokens + own)[with_rows].sum(dtype=np.int64)))

    def tables(self, layout: AttentionLayout) -> BatchTables:
        return naive_tables(layout)

    def outline(self, layout: AttentionLayout) -> BatchTables:
        return naive_outline(layout)

    def engine(self, tables: BatchTables, backend: Backend) -> str:
        name = super().engine(tables, backend)
        return f"{name}_rows" if backend is Backend.FA3 else name  # loads without block tables


class FlashInferRagged(FlashInferAttention):
    """One batch over block tables that share the prefixes' pages."""

    kernel = Kernel.RAGGED
    phase = Phase.PREFILL

    def refusal(self, layout: AttentionLayout) -> str | None:
        items = layout.segment_rows[layout.segment_is_item]
        if not items.any() and not self._runtime.widens:
            return None
        used = int(layout.node_tokens.sum(dtype=np.int64)) + int(items.sum(dtype=np.int64))
        # A page that is not full for every node, two for every item.
        ends = layout.num_nodes + 2 * len(items)
        return self.scratch_refusal(used + ends * layout.page_size)

    def tables(self, layout: AttentionLayout) -> BatchTables:
        return ragged_tables(layout, copied=self._runtime.widens)


class FlashInferMultiItem(FlashInferAttention):
    """A tree is one request: FlashInfer's multi-item mask, without delimiters.

    It counts 16 bits of tokens in an item, and only its paged kernels know the mask.
    """

    kernel = Kernel.MULTI_ITEM
    phase = Phase.PREFILL

    def refusal(self, layout: AttentionLayout) -> str | None:
        requests = logical_requests(layout)
        items = int((layout.segment_rows * layout.segment_is_item).sum(dtype=np.int64))
        ends = (len(requests) + layout.num_segments) * layout.page_size
        copied = items + int(layout.node_tokens.sum(dtype=np.int64)) + ends
        return tree_refusal(layout) or multi_item_refusal(layout) or self.scratch_refusal(copied)

    def tables(self, layout: AttentionLayout) -> BatchTables:
        return multi_item_tables(layout)

    def blocks(self, layout: AttentionLayout, tables: BatchTables) -> tuple[Int32, Int32]:
        masks = [item_mask(layout, request) for request in logical_requests(layout)]
        tiles = [tile for mask in masks for tile in item_tiles(mask)]
        return int32([tile.rows for tile in tiles]), int32([tile.tokens for tile in tiles])

    def engine(self, tables: BatchTables, backend: Backend) -> str:
        return f"{super().engine(tables, backend)}_items"  # reads up to 3 times what it needs


class FlashInferCustomMask(FlashInferAttention):
    """A tree is one request with a bit for every row and token; fa3 has no such mask."""

    kernel = Kernel.CUSTOM_MASK
    phase = Phase.PREFILL

    def __init__(self, runtime: FlashInferRuntime) -> None:
        super().__init__(runtime)
        self._backends = (Backend.FA2,)

    def refusal(self, layout: AttentionLayout) -> str | None:
        bits, copied = 0, 0
        for request in logical_requests(layout):
            tokens = request_tokens(layout, request)
            bits += request_rows(layout, request) * tokens
            copied += tokens + layout.page_size
        if bits > MAX_MASK_BITS:
            return f"the masks would have {bits} bits, the limit is {MAX_MASK_BITS}"
        return self.scratch_refusal(copied)

    def tables(self, layout: AttentionLayout) -> BatchTables:
        return custom_mask_tables(layout)

    def outline(self, layout: AttentionLayout) -> BatchTables:
        return custom_mask_outline(layout)

    def plan_masked(self, layout: AttentionLayout, mask: PackedMask) -> FlashInferPlan:
        """A plan with the caller's mask: a request a tree, over its nodes and then its items.

        ValueError: the mask has other numbers of rows or tokens than the layout.
        """
        return self.plan_tables(layout, custom_mask_tables(layout, mask))

    def engine(self, tables: BatchTables, backend: Backend) -> str:
        return f"{super().engine(tables, backend)}_mask"


class FlashInferPaged(FlashInferAttention):
    """Decode: every row reads the pages of its own block table, shared or not."""

    kernel = Kernel.PAGED
    phase = Phase.DECODE

    def refusal(self, layout: AttentionLayout) -> str | None:
        return decode_refusal(layout)

    def tables(self, layout: AttentionLayout) -> BatchTables:
        return pool_tables(layout, causal=False)
