"""Tokens drawn from logits on a CUDA device, as the tables of the slots say: three launches.

A token is the inverse of the cumulated distribution, in the order of ids, at a number that depends
on the slot's seed and the token's index only. All sums have a fixed order of their own in each row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stemserve.kernels.fused.fused_norm import power_of_2
from stemserve.kernels.sampling import draw_triton, wide_draw_triton
from stemserve.kernels.sampling.slot_tables import GREEDY_TEMPERATURE, DrawnTokens, SlotTables

KERNELS: Any = draw_triton  # untyped: device code
WIDE_KERNELS: Any = wide_draw_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawShape:
    """How a row is divided. All numbers are powers of two."""

    width: int = 128  # tokens of a block
    blocks: int = 32  # of a program that summarises them
    picks: int = 128  # blocks that one program holds
    warps: int = 16


FASTEST = DrawShape()


def draw_tokens(
    logits: Tensor,  # [n, vocab] float32; rows may be strided
    tables: SlotTables,
    slots: Tensor,  # [n] int64
    index: Tensor,  # [n] int64: tokens that the slot's request generated before
    shape: DrawShape = FASTEST,
) -> DrawnTokens:
    """Also keeps the tokens as the slots' last ones. No launch depends on what the tensors hold."""
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError("logits must be float32, those of a row side by side")
    drawn = DrawnTokens(
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows),
        logits.new_empty(rows, dtype=torch.bool),
    )
    if not rows:
        return drawn
    blocks = -(-vocab // shape.width)
    pad = power_of_2(blocks)
    parts = logits.new_empty((3, rows, blocks))  # tops, totals, masses
    picks = logits.new_empty((rows, shape.picks), dtype=torch.int32)
    is_wide = logits.new_empty(rows, dtype=torch.int8)
    sizes = (logits.stride(0), vocab, blocks)
    KERNELS.block_kernel[(-(-blocks // shape.blocks), rows)](
        logits,
        slots,
        tables.params,
        *parts,
        *sizes,
        GREEDY=GREEDY_TEMPERATURE,
        BLOCKS=shape.blocks,
        WIDTH=shape.width,
        num_warps=4,
    )
    where = (slots, index, tables.params, tables.last_token)
    KERNELS.row_kernel[(rows,)](
        logits,
        *where,
        *parts,
        picks,
        is_wide,
        *drawn,
        *sizes,
        GREEDY=GREEDY_TEMPERATURE,
        PAD=pad,
        PICKS=shape.picks,
        WIDTH=shape.width,
        num_warps=shape.warps,
    )
    tile = shape.picks * shape.width
    tiles = power_of_2(-(-vocab // tile))
    WIDE_KERNELS.wide_kernel[(rows,)](
        logits,
        *where,
        *parts,
        is_wide,
        *logits.new_empty((2, rows, tile), dtype=torch.int32),  # keys and ids
        logits.new_empty((rows, tiles), dtype=torch.float64),
        *drawn,
        *sizes,
        PAD=pad,
        WIDTH=shape.width,
        TILE=tile,
        TILES=tiles,
        num_warps=shape.warps,
    )
    return drawn
