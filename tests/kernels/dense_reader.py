"""What the dense kernel computes from its tables, in float64: its masks, spelt out."""

from typing import cast

import torch
from torch import Tensor

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.dense.items import Division
from stemserve.kernels.dense.plan import HostPlan
from stemserve.kernels.dense.tables import BLOCK_TOKENS, COPIED, MASKED, OWN
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.layout import HeadShape, Int32
from stemserve.kernels.token_sources import EMPTY

PADDING = 2 * BLOCK_TOKENS  # TMA fills up with zeros what is outside of a tensor


def read_plan(plan: HostPlan, q: Tensor, kv: LayerKV, shape: HeadShape) -> AttentionState:
    written = len(q) + plan.partial_rows
    out = torch.full((written, *q.shape[1:]), torch.nan, dtype=torch.float64)
    target = AttentionState(out, out[:, :, 0].clone())
    copies = [_copied(plan.streams.sources, pages) for pages in (kv.k_pages, kv.v_pages)]
    padding = kv.k_rows.new_zeros(PADDING, *kv.k_rows.shape[1:])
    rows = [torch.cat([x, padding]) for x in (kv.k_rows, kv.v_rows)]
    for stage in plan.stages:
        target.out[len(q) :] = torch.nan
        for tile in cast(list[list[int]], stage.division.tiles.tolist()):
            state = _read_tile(plan, tile, stage.blocks, q, (copies, rows), shape)
            place = slice(tile[6], tile[6] + tile[1])
            assert target.out[place].isnan().all(), "a row is in two tiles"
            target.out[place], target.lse[place] = state.out, state.lse
        _merge(target, stage.division)
    return AttentionState(target.out[: len(q)], target.lse[: len(q)])


def _read_tile(
    plan: HostPlan,
    tile: list[int],
    blocks: Int32,
    q: Tensor,
    sources: tuple[list[Tensor], list[Tensor]],
    shape: HeadShape,
) -> AttentionState:
    row = torch.arange(tile[0], tile[0] + tile[1])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    masks: list[Tensor] = []
    assert tile[3] + tile[5] > 0
    for block in _tile_blocks(tile, blocks):
        source = sources[0 if block[3] & COPIED else 1]
        k, v = (x[block[0] : block[0] + BLOCK_TOKENS] for x in source)
        assert len(k) == BLOCK_TOKENS
        assert v.isfinite().all()  # a weight of 0 does not hide a NaN
        keys.append(k)
        values.append(v)
        masks.append(_mask(plan, row, block))
    mask = torch.cat(masks, dim=1)
    return reference.masked_attention(
        q[row], torch.cat(keys).nan_to_num(), torch.cat(values), mask, shape
    )


def _merge(target: AttentionState, division: Division) -> None:
    for row, parts in zip(division.targets.tolist(), division.parts.tolist(), strict=True):
        used = [part for part in parts if part >= 0]
        merged = reference.merge_states(target.out[used, None], target.lse[used, None])
        target.out[row], target.lse[row] = merged.out[0], merged.lse[0]


def _tile_blocks(tile: list[int], blocks: Int32) -> list[list[int]]:
    shared, own = range(tile[2], tile[2] + tile[3]), range(tile[4], tile[4] + tile[5])
    return cast(list[list[int]], blocks[[*shared, *own]].tolist())


def _mask(plan: HostPlan, row: Tensor, block: list[int]) -> Tensor:  # [rows, BLOCK_TOKENS]
    at, place, tokens, flags = block
    token = torch.arange(BLOCK_TOKENS)
    if not flags & MASKED:
        return torch.ones(len(row), BLOCK_TOKENS, dtype=torch.bool)
    if flags & OWN:
        first = _tensor(plan.rows.first)[row].unsqueeze(1)
        return (token + at >= first) & (token + at <= row.unsqueeze(1))
    seen = _tensor(plan.rows.seen)[row].unsqueeze(1)
    return (token < tokens) & (token + place < seen)


def _copied(sources: Int32, pages: Tensor) -> Tensor:
    source = _tensor(sources)
    copy = pages.flatten(0, 1)[source.clamp_min(0)]
    copy[source == EMPTY] = 0.0
    return copy


def _tensor(array: Int32) -> Tensor:
    return index_tensor(array, torch.device("cpu"))
