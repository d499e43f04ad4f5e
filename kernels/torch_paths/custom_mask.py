"""Custom-mask attention: a tree is one request with an explicit bit for every (row, token)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape, Int32, int32
from stemserve.kernels.strategy import TORCH, Kernel, Part, Phase, Work
from stemserve.kernels.torch_paths.block_attention import attend
from stemserve.kernels.torch_paths.device_call import FlatKV
from stemserve.kernels.torch_paths.logical_request import (
    LogicalRequest,
    logical_requests,
    request_row_order,
    segment_row_list,
)
from stemserve.kernels.torch_paths.packed_mask import Bool, PackedMask
from stemserve.kernels.torch_paths.schedule import empty_state

TILE_ROWS = 128  # unpacked at a time; a multiple of 8, so that a tile starts at a byte
MAX_MASK_BITS = 1 << 28  # of one request; unpacked on the host while planning


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRequest:
    row_start: int
    row_stop: int
    slots: Tensor  # [stored tokens] slots of the pool
    own_rows: Tensor  # [own tokens] rows of the layout
    bits: Tensor  # [bytes] little-endian, at least one bit a row
    blind: Tensor | None  # [rows] rows that see nothing; None: there are none

    @property
    def tokens(self) -> int:
        return len(self.slots) + len(self.own_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomMaskPlan:
    work: Work
    num_rows: int
    requests: list[MaskedRequest]
    row_order: Tensor | None  # [rows] layout rows, tree after tree; None: they are so
    row_place: Tensor | None  # [rows] the inverse


class CustomMaskAttention:
    """No tile is skipped, so the work is rows x tokens of each tree; any mask can be given.

    As FlashInfer's packed custom masks; SpecInfer (arXiv 2305.09781) verifies token trees so.
    """

    kernel = Kernel.CUSTOM_MASK
    phase = Phase.PREFILL

    def __init__(self, shape: HeadShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    def refusal(self, layout: AttentionLayout) -> str | None:
        for request in logical_requests(layout):
            bits = request_rows(layout, request) * request_tokens(layout, request)
            if bits > MAX_MASK_BITS:
                return f"the mask of a tree would have {bits} bits, the limit is {MAX_MASK_BITS}"
        return None

    def work(self, layout: AttentionLayout) -> Work:
        requests = logical_requests(layout)
        return _work(
            [request_rows(layout, request) for request in requests],
            [request_tokens(layout, request) for request in requests],
        )

    def plan(self, layout: AttentionLayout) -> CustomMaskPlan:
        requests = logical_requests(layout)
        masks = [layout_mask(layout, request) for request in requests]
        return self.plan_masked(layout, PackedMask.pack(masks))

    def plan_masked(self, layout: AttentionLayout, mask: PackedMask) -> CustomMaskPlan:
        """A plan with the caller's mask: a request a tree, over its nodes and then its items.

        ValueError: the mask has other numbers of rows or tokens than the layout.
        """
        requests = logical_requests(layout)
        rows = [request_rows(layout, request) for request in requests]
        tokens = [request_tokens(layout, request) for request in requests]
        if mask.rows.tolist() != rows or mask.tokens.tolist() != tokens:
            raise ValueError(
                f"the layout needs masks of {rows} rows x {tokens} tokens, not"
                f" {mask.rows.tolist()} x {mask.tokens.tolist()}"
            )
        order = request_row_order(layout, requests)
        place = None if order is None else int32(np.argsort(order))
        return CustomMaskPlan(
            work=_work(rows, tokens),
            num_rows=layout.num_rows,
            requests=[
                self._request(layout, request, mask.unpack(i)) for i, request in enumerate(requests)
            ],
            row_order=None if order is None else index_tensor(order, self._device),
            row_place=None if place is None else index_tensor(place, self._device),
        )

    def _request(
        self, layout: AttentionLayout, request: LogicalRequest, mask: Bool
    ) -> MaskedRequest:
        seen = np.logical_or.reduce(mask, axis=1)
        if mask.shape[1]:
            mask[~seen, 0] = True  # softmax needs a token; the row's result is replaced
        items = request.segments[layout.segment_is_item[request.segments]]
        slots = [_node_slots(layout, node) for node in request_nodes(layout, request)]
        return MaskedRequest(
            row_start=request.row_start,
            row_stop=request.row_start + len(mask),
            slots=index_tensor(np.concatenate([np.empty(0, np.int32), *slots]), self._device),
            own_rows=index_tensor(segment_row_list(layout, items), self._device),
            bits=device_tensor(np.packbits(mask.ravel(), bitorder="little"), self._device),
            blind=None if seen.all() else device_tensor(np.logical_not(seen), self._device),
        )

    def run(self, plan: CustomMaskPlan, q: Tensor, kv: LayerKV) -> AttentionState:
        flat = FlatKV.of_layer(kv)
        ordered = q if plan.row_order is None else q.index_select(0, plan.row_order)
        state = empty_state(plan.num_rows, q)
        for request in plan.requests:
            if request.tokens:
                _run_request(request, ordered, flat, state, self._shape)
        out, lse = state
        if plan.row_place is not None:
            out, lse = out.index_select(0, plan.row_place), lse.index_select(0, plan.row_place)
        return AttentionState(out.to(q.dtype), lse)


def request_nodes(layout: AttentionLayout, request: LogicalRequest) -> list[int]:
    """Nodes that a segment of the request reads, parents first."""
    chains = (layout.chain(int(node)) for node in layout.segment_node[request.segments])
    return sorted({node for chain in chains for node in chain})


def request_rows(layout: AttentionLayout, request: LogicalRequest) -> int:
    return int(layout.segment_rows[request.segments].sum())


def request_tokens(layout: AttentionLayout, request: LogicalRequest) -> int:
    items = request.segments[layout.segment_is_item[request.segments]]
    stored = int(layout.node_tokens[request_nodes(layout, request)].sum())
    return stored + int(layout.segment_rows[items].sum())


def layout_mask(layout: AttentionLayout, request: LogicalRequest) -> Bool:  # [rows, tokens]
    nodes = request_nodes(layout, request)
    ends = np.cumsum(layout.node_tokens[nodes])
    column = dict(zip(nodes, (ends - layout.node_tokens[nodes]).tolist(), strict=True))
    mask = np.zeros((request_rows(layout, request), request_tokens(layout, request)), np.bool_)
    row, own_column = 0, int(ends[-1]) if nodes else 0
    for segment in request.segments:
        rows, chain = int(layout.segment_rows[segment]), int(layout.chain_tokens[segment])
        is_item = bool(layout.segment_is_item[segment])
        visible = np.full(rows, chain) if is_item else chain - rows + 1 + np.arange(rows)
        lines = mask[row : row + rows]
        for node in layout.chain(int(layout.segment_node[segment])):
            tokens, start = int(layout.node_tokens[node]), int(layout.node_start[node])
            shown = start + np.arange(tokens) < visible[:, None]
            lines[:, column[node] : column[node] + tokens] = shown
        if is_item:
            lines[:, own_column : own_column + rows] = np.tri(rows, dtype=np.bool_)
            own_column += rows
        row += rows
    return mask


def _node_slots(layout: AttentionLayout, node: int) -> Int32:
    token = np.arange(int(layout.node_tokens[node]), dtype=np.int32)
    page = layout.pages(node)[token // layout.page_size]
    return page * layout.page_size + token % layout.page_size


def _work(rows: list[int], tokens: list[int]) -> Work:
    tiles = [
        (min(TILE_ROWS, count - start), width)
        for count, width in zip(rows, tokens, strict=True)
        for start in range(0, count, TILE_ROWS)
        if width
    ]
    part = Part(
        engine=TORCH,
        rows=int32([tile[0] for tile in tiles]),
        kv_tokens=int32([tile[1] for tile in tiles]),
        launches=len(tiles) + sum(width > 0 for width in tokens),
    )
    return Work(parts=(part,))


def _run_request(
    request: MaskedRequest, q: Tensor, kv: FlatKV, state: AttentionState, shape: HeadShape
) -> None:
    keys, values = (
        torch.cat([stored, rows.index_select(0, request.own_rows)])
        for stored, rows in zip(kv.stored(request.slots), (kv.k_rows, kv.v_rows), strict=True)
    )
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=q.device)
    for start in range(request.row_start, request.row_stop, TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, request.row_stop))
        first = (start - request.row_start) * request.tokens
        count = (rows.stop - rows.start) * request.tokens
        packed = request.bits[first // 8 : -(-(first + count) // 8)]
        hidden = (packed.unsqueeze(1) & weights).eq(0).flatten()[:count]
        mask = torch.zeros(count, device=q.device).masked_fill_(hidden, -torch.inf)
        mask = mask.view(1, 1, -1, request.tokens)
        part = attend(
            q[rows].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), shape, mask=mask
        )
        state.out[rows], state.lse[rows] = part.out[0], part.lse[0]
    if request.blind is not None:
        own = slice(request.row_start, request.row_stop)
        state.out[own].masked_fill_(request.blind[:, None, None], 0.0)
        state.lse[own].masked_fill_(request.blind[:, None], -torch.inf)
