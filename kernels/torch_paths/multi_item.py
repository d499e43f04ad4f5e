"""Multi-item attention: a tree is one request, its mask three small arrays, its softmax one."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.strategy import TORCH, Kernel, Part, Phase, Work
from stemserve.kernels.torch_paths.block_attention import attend
from stemserve.kernels.torch_paths.calls import PageTokens
from stemserve.kernels.torch_paths.device_call import FlatKV, KeySource, page_source
from stemserve.kernels.torch_paths.item_mask import ItemMask, ItemTile, item_mask, item_tiles
from stemserve.kernels.torch_paths.logical_request import (
    LogicalRequest,
    logical_requests,
    request_row_order,
)
from stemserve.kernels.torch_paths.schedule import empty_state


def tree_refusal(layout: AttentionLayout) -> str | None:
    """Why a tree is no request of [prefix | items], or None."""
    for request in logical_requests(layout):
        if len(np.unique(layout.segment_node[request.segments])) > 1:
            return "multi-item attention has one prefix a tree; this tree branches"
        if (~layout.segment_is_item[request.segments]).sum() > 1:
            return "multi-item attention has one run of context rows a tree; this has several"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRequest:
    """A logical request on the device; rows are those of the row order."""

    row_start: int
    prefix: KeySource | None  # None: no stored tokens
    prefix_len: int
    token_pos_in_items: Tensor  # [item rows]
    item_start: int  # first item row
    tiles: list[ItemTile]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiItemPlan:
    work: Work
    num_rows: int
    requests: list[ItemRequest]
    row_order: Tensor | None  # [rows] layout rows, tree after tree; None: they are so
    row_place: Tensor | None  # [rows] the inverse


class MultiItemAttention:
    """As FlashInfer's multi-item scoring, with its `prefix_len` and `token_pos_in_items`."""

    kernel = Kernel.MULTI_ITEM
    phase = Phase.PREFILL

    def __init__(self, shape: HeadShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    def refusal(self, layout: AttentionLayout) -> str | None:
        return tree_refusal(layout)

    def work(self, layout: AttentionLayout) -> Work:
        masks = [item_mask(layout, request) for request in logical_requests(layout)]
        return _work(masks)

    def plan(self, layout: AttentionLayout) -> MultiItemPlan:
        requests = logical_requests(layout)
        masks = [item_mask(layout, request) for request in requests]
        order = request_row_order(layout, requests)
        return MultiItemPlan(
            work=_work(masks),
            num_rows=layout.num_rows,
            requests=[
                self._request(layout, request, mask)
                for request, mask in zip(requests, masks, strict=True)
            ],
            row_order=None if order is None else index_tensor(order, self._device),
            row_place=None
            if order is None
            else index_tensor(int32(np.argsort(order)), self._device),
        )

    def _request(
        self, layout: AttentionLayout, request: LogicalRequest, mask: ItemMask
    ) -> ItemRequest:
        prefix: KeySource | None = None
        if mask.prefix_len:
            tokens = PageTokens(
                pages=layout.chain_pages(int(layout.segment_node[request.segments[0]])),
                start=0,
                tokens=mask.prefix_len,
                page_size=layout.page_size,
            )
            prefix = page_source(tokens, 1, self._device)
        return ItemRequest(
            row_start=request.row_start,
            prefix=prefix,
            prefix_len=mask.prefix_len,
            token_pos_in_items=index_tensor(mask.token_pos_in_items, self._device),
            item_start=request.row_start + mask.context_rows,
            tiles=item_tiles(mask),
        )

    def run(self, plan: MultiItemPlan, q: Tensor, kv: LayerKV) -> AttentionState:
        flat = FlatKV.of_layer(kv)
        if plan.row_order is not None:
            q = q.index_select(0, plan.row_order)
            k_rows = flat.k_rows.index_select(0, plan.row_order)
            v_rows = flat.v_rows.index_select(0, plan.row_order)
            flat = FlatKV(flat.k_slots, flat.v_slots, k_rows, v_rows)
        state = empty_state(plan.num_rows, q)
        for request in plan.requests:
            _run_request(request, q, flat, state, self._shape)
        out, lse = state
        if plan.row_place is not None:
            out, lse = out.index_select(0, plan.row_place), lse.index_select(0, plan.row_place)
        return AttentionState(out.to(q.dtype), lse)


def _work(masks: list[ItemMask]) -> Work:
    tiles = [tile for mask in masks for tile in item_tiles(mask)]
    part = Part(
        engine=TORCH,
        rows=int32([tile.rows for tile in tiles]),
        kv_tokens=int32([tile.tokens for tile in tiles]),
        launches=len(tiles) + sum(mask.prefix_len > 0 for mask in masks),
    )
    return Work(parts=(part,))


def _run_request(
    request: ItemRequest, q: Tensor, kv: FlatKV, state: AttentionState, shape: HeadShape
) -> None:
    """Keys are [prefix | own rows of the tile]: the prefix is copied once, the end a tile."""
    size = max((tile.tokens for tile in request.tiles), default=0)
    keys = q.new_empty(size, *kv.k_rows.shape[1:])
    values = torch.empty_like(keys)
    if request.prefix is not None:
        k, v = request.prefix.fetch(kv)
        stop = min(size, request.prefix_len)
        keys[:stop], values[:stop] = k[0, :stop], v[0, :stop]
    for tile in request.tiles:
        if tile.own_rows:
            own = slice(request.item_start + tile.own_start, request.item_start + tile.own_stop)
            keys[tile.prefix_tokens : tile.tokens] = kv.k_rows[own]
            values[tile.prefix_tokens : tile.tokens] = kv.v_rows[own]
        rows = slice(request.row_start + tile.row_start, request.row_start + tile.row_stop)
        part = attend(
            q[rows].unsqueeze(0),
            keys[: tile.tokens].unsqueeze(0),
            values[: tile.tokens].unsqueeze(0),
            shape,
            mask=tile.mask(request.token_pos_in_items),
        )
        state.out[rows], state.lse[rows] = part.out[0], part.lse[0]
