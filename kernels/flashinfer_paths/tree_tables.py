"""Trees as single requests of FlashInfer: its multi-item mask, or a bit for every row and token."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.flashinfer_paths.prefill_batch import (
    BatchTables,
    ItemPositions,
    PrefillBatch,
)
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.token_sources import EMPTY, token_slots
from stemserve.kernels.torch_paths.custom_mask import (
    layout_mask,
    request_nodes,
    request_rows,
    request_tokens,
)
from stemserve.kernels.torch_paths.item_mask import ItemMask, item_mask
from stemserve.kernels.torch_paths.logical_request import (
    LogicalRequest,
    logical_requests,
    request_row_order,
    segment_row_list,
)
from stemserve.kernels.torch_paths.packed_mask import Bool, PackedMask

UINT16_MAX = (1 << 16) - 1
MAX_PLACES = 1 << 26  # of a batch's item positions, which are padded to the longest request


@dataclass(slots=True)
class _ItemBatch:
    """Requests of the multi-item mask, one after the other."""

    page_size: int
    rows: list[int] = field(default_factory=list[int])
    kv_tokens: list[int] = field(default_factory=list[int])
    prefixes: list[int] = field(default_factory=list[int])
    places: list[Int32] = field(default_factory=list[Int32])
    sources: list[Int32] = field(default_factory=list[Int32])

    def add(
        self,
        rows: int,
        prefix: Int32,  # [tokens] slots of the pool
        own_rows: Int32,  # [tokens] rows of the step
        places: Int32,  # [own rows] of each in its item, for the mask
    ) -> None:
        """A request whose keys are the prefix and the rows; blind rows have neither."""
        if not rows:
            return
        tokens = len(prefix) + len(own_rows)
        self.rows.append(rows)
        self.kv_tokens.append(tokens)
        self.prefixes.append(len(prefix))
        self.places.append(places)
        padding = np.full(-tokens % self.page_size, EMPTY, np.int32)
        self.sources += [prefix, -1 - own_rows, padding]

    def batch(self) -> PrefillBatch:
        width = max((len(places) for places in self.places), default=0)
        padded = np.zeros((len(self.places), width), np.uint16)
        for line, places in zip(padded, self.places, strict=True):
            line[: len(places)] = places
        pages = sum(len(part) for part in self.sources) // self.page_size
        return PrefillBatch(
            rows=int32(self.rows),
            kv_tokens=int32(self.kv_tokens),
            pages=np.arange(pages, dtype=np.int32),
            page_size=self.page_size,
            causal=True,
            items=ItemPositions(
                prefix_tokens=np.array(self.prefixes, np.uint32),
                places=padded,
                longest_item=_longest(self.places),
            ),
        )


def multi_item_refusal(layout: AttentionLayout) -> str | None:
    requests = logical_requests(layout)
    width, lines = 0, 0
    for request in requests:
        mask = item_mask(layout, request)
        if mask.max_item_len > UINT16_MAX:
            return f"an item has {mask.max_item_len} rows, the mask counts up to {UINT16_MAX}"
        width = max(width, mask.item_rows if mask.prefix_len else mask.max_item_len)
        lines += 2 if mask.prefix_len else 1 + len(request.segments)
    if width * lines > MAX_PLACES:
        return f"positions of {lines} requests x {width} rows pass the limit of {MAX_PLACES}"
    return None


def multi_item_tables(layout: AttentionLayout) -> BatchTables:
    """A tree over one prefix is a request; without a prefix every item is one.

    The kernels of FlashInfer skip tiles from the end of the prefix on, so there has to be one.
    """
    requests = logical_requests(layout)
    batch = _ItemBatch(layout.page_size)
    for request in requests:
        mask = item_mask(layout, request)
        if mask.prefix_len:
            _add_tree(batch, layout, request, mask)
        else:
            _add_items(batch, layout, request, mask)
    return BatchTables(
        batch=batch.batch(),
        sources=_joined(batch.sources),
        row_order=request_row_order(layout, requests),
    )


def _add_tree(
    batch: _ItemBatch, layout: AttentionLayout, request: LogicalRequest, mask: ItemMask
) -> None:
    none = int32([])
    blind = max(0, mask.context_rows - mask.prefix_len)
    batch.add(blind, none, none, none)
    own = segment_row_list(layout, _items(layout, request))
    prefix = _prefix_slots(layout, int(layout.segment_node[request.segments[0]]))
    rows = mask.context_rows - blind + mask.item_rows
    batch.add(rows, prefix, own, mask.token_pos_in_items + np.int32(1))


def _add_items(
    batch: _ItemBatch, layout: AttentionLayout, request: LogicalRequest, mask: ItemMask
) -> None:
    none = int32([])
    batch.add(mask.context_rows, none, none, none)
    for segment in _items(layout, request):
        own = segment_row_list(layout, int32([segment]))
        batch.add(len(own), none, own, np.arange(1, len(own) + 1, dtype=np.int32))


def custom_mask_tables(layout: AttentionLayout, mask: PackedMask | None = None) -> BatchTables:
    """A request a tree over its nodes and then its items; `mask` in place of the layout's own.

    ValueError: the mask has other numbers of rows or tokens than the layout.
    """
    requests = logical_requests(layout)
    rows = [request_rows(layout, request) for request in requests]
    tokens = [request_tokens(layout, request) for request in requests]
    if mask is not None and (mask.rows.tolist() != rows or mask.tokens.tolist() != tokens):
        raise ValueError(
            f"the layout needs masks of {rows} rows x {tokens} tokens, not"
            f" {mask.rows.tolist()} x {mask.tokens.tolist()}"
        )
    sources: list[Int32] = []
    shown: list[Bool] = []
    for i, request in enumerate(requests):
        nodes = int32(request_nodes(layout, request))
        own = segment_row_list(layout, _items(layout, request))
        padding = np.full(-tokens[i] % layout.page_size, EMPTY, np.int32)
        sources += [token_slots(layout, nodes), -1 - own, padding]
        shown.append(layout_mask(layout, request) if mask is None else mask.unpack(i))
    joined = _joined(sources)
    return BatchTables(
        batch=PrefillBatch(
            rows=int32(rows),
            kv_tokens=int32(tokens),
            pages=np.arange(len(joined) // layout.page_size, dtype=np.int32),
            page_size=layout.page_size,
            causal=False,
            mask=PackedMask.pack(shown) if mask is None else mask,
            masked_rows=int32(np.flatnonzero(~np.concatenate([m.any(axis=1) for m in shown])))
            if shown
            else None,
        ),
        sources=joined,
        row_order=request_row_order(layout, requests),
    )


def custom_mask_outline(layout: AttentionLayout) -> BatchTables:
    """As `custom_mask_tables`, without the masks: these take long to make."""
    requests = logical_requests(layout)
    tokens = int32([request_tokens(layout, request) for request in requests])
    batch = PrefillBatch(
        rows=int32([request_rows(layout, request) for request in requests]),
        kv_tokens=tokens,
        pages=int32([]),
        page_size=layout.page_size,
        causal=False,
    )
    copied = int(batch.page_counts.sum()) * layout.page_size
    return BatchTables(batch=batch, sources=np.zeros(copied, np.int32))


def _items(layout: AttentionLayout, request: LogicalRequest) -> Int32:
    return request.segments[layout.segment_is_item[request.segments]]


def _prefix_slots(layout: AttentionLayout, node: int) -> Int32:
    return token_slots(layout, int32(layout.chain(node)))


def _joined(parts: list[Int32]) -> Int32:
    return np.concatenate([int32([]), *parts])


def _longest(places: list[Int32]) -> NDArray[np.uint16]:
    return np.array([int(line.max(initial=0)) for line in places], np.uint16)
