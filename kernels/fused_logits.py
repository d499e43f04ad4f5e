"""Log-probabilities of chosen tokens on a CUDA device, without the [rows, vocab] logits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stemserve.kernels import fused_logits_triton
from stemserve.kernels.fused_norm import power_of_2

KERNELS: Any = fused_logits_triton  # untyped: device code
CHOSEN_BLOCK = 1024


class ChosenLogprobs(NamedTuple):
    logprobs: Tensor  # [chosen] float32, over the full vocabulary
    argmax: Tensor  # [rows] int64, the lowest on a tie
    lse: Tensor  # [rows] float32, natural log; not finite where a logit is NaN or +inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Of the product of hidden states and weights."""

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int


FEW_ROWS = TileShape(rows=64, tokens=128, depth=64, warps=4, stages=4)
MANY_ROWS = TileShape(rows=128, tokens=128, depth=64, warps=4, stages=3)


def tile_shape(rows: int, itemsize: int) -> TileShape:
    shape = FEW_ROWS if rows <= FEW_ROWS.rows else MANY_ROWS
    if itemsize <= 2:
        return shape
    return TileShape(rows=64, tokens=64, depth=32, warps=4, stages=2)


def chosen_logprobs(
    hidden: Tensor,  # [rows, width], rows may be strided
    weight: Tensor,  # [vocab, width], contiguous, of the same type
    chosen_rows: Tensor,  # [chosen] int64
    chosen_tokens: Tensor,  # [chosen] int64
    shape: TileShape | None = None,
) -> ChosenLogprobs:
    rows, width = hidden.shape
    vocab = len(weight)
    if hidden.stride(1) != 1 or not weight.is_contiguous() or weight.dtype != hidden.dtype:
        raise ValueError("hidden states and weights must be of one type, numbers side by side")
    tile = shape or tile_shape(rows, hidden.dtype.itemsize)
    result = _empty(hidden, len(chosen_rows))
    if rows:
        tops, totals, ids = _tiles(hidden, weight, tile)
        tiles = -(-vocab // tile.tokens)
        block = power_of_2(tiles)
        KERNELS.merge_tiles_kernel[(rows,)](
            tops, totals, ids, result.lse, result.argmax, tiles, BLOCK=block, num_warps=4
        )
    if len(chosen_rows):
        KERNELS.chosen_kernel[(len(chosen_rows),)](
            hidden,
            weight,
            result.lse,
            chosen_rows,
            chosen_tokens,
            result.logprobs,
            width,
            hidden.stride(0),
            BLOCK=CHOSEN_BLOCK,
            num_warps=4,
        )
    return result


def _empty(hidden: Tensor, chosen: int) -> ChosenLogprobs:
    return ChosenLogprobs(
        hidden.new_empty(chosen, dtype=torch.float32),
        hidden.new_empty(len(hidden), dtype=torch.int64),
        hidden.new_empty(len(hidden), dtype=torch.float32),
    )


def _tiles(hidden: Tensor, weight: Tensor, tile: TileShape) -> tuple[Tensor, Tensor, Tensor]:
    (rows, width), vocab = hidden.shape, len(weight)
    tiles = -(-vocab // tile.tokens)
    tops = hidden.new_empty((rows, tiles), dtype=torch.float32)
    totals = torch.empty_like(tops)
    ids = hidden.new_empty((rows, tiles), dtype=torch.int32)
    KERNELS.tile_kernel[(-(-rows // tile.rows) * tiles,)](
        hidden,
        weight,
        tops,
        totals,
        ids,
        rows,
        vocab,
        width,
        hidden.stride(0),
        tiles,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        EVEN=width % tile.depth == 0,
        WIDEN=hidden.dtype == torch.float32 or hidden.device.type == "cpu",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return tops, totals, ids
