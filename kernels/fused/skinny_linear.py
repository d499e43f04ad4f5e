"""Products of few rows with a weight matrix on a CUDA device: one launch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stemserve.kernels.fused import skinny_linear_triton
from stemserve.kernels.fused.norm import power_of_2
from stemserve.kernels.overlap import overlap

KERNELS: Any = skinny_linear_triton  # untyped: device code
MOST_ROWS = 64  # of more the library's products are as fast
LEAST_ROWS = 16  # of a tile
ALIGNMENT = 16  # bytes, of what is prefetched


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyShape:
    """Of the tiles, and how the work is divided."""

    columns: int
    depth: int
    stages: int
    parts: int  # of the sum, computed by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class NextProduct:
    """What follows, so that its weights are in the L2 cache when it begins."""

    weight: Tensor  # [columns, depth], contiguous
    parts: int
    ahead: int  # bytes that are sent for, in all

    @property
    def piece_bytes(self) -> int:
        """Of each part of each column."""
        columns, depth = self.weight.shape
        whole = depth // self.parts * self.weight.dtype.itemsize
        piece = min(whole, self.ahead // (columns * self.parts))
        return piece // ALIGNMENT * ALIGNMENT


def skinny_linear(
    x: Tensor,  # [rows, depth], rows may be strided; at most MOST_ROWS
    weight: Tensor,  # [columns, depth], contiguous
    bias: Tensor | None,  # [columns]
    shape: SkinnyShape,
    following: NextProduct | None = None,
) -> Tensor:  # [rows, columns], or float32 [parts, rows, columns] that add up to it
    (rows, depth), columns = x.shape, len(weight)
    part = depth // shape.parts
    if part % shape.depth or part * shape.parts != depth:
        raise ValueError(f"{depth} numbers have no {shape.parts} parts of whole tiles")
    out = x.new_empty(
        (shape.parts, rows, columns), dtype=x.dtype if shape.parts == 1 else torch.float32
    )
    tile = max(LEAST_ROWS, power_of_2(rows))
    after = following or NextProduct(weight=weight, parts=1, ahead=0)
    KERNELS.skinny_kernel[(-(-columns // shape.columns), shape.parts)](
        TensorDescriptor.from_tensor(x, [tile, shape.depth]),
        TensorDescriptor.from_tensor(weight, [shape.columns, shape.depth]),
        weight if bias is None else bias,
        out,
        rows,
        columns,
        depth,
        part,
        after.weight,
        *after.weight.shape,
        after.parts,
        after.piece_bytes,
        ROWS=tile,
        COLUMNS=shape.columns,
        DEPTH=shape.depth,
        STAGES=shape.stages,
        BIAS=bias is not None,
        WIDEN=x.device.type == "cpu",
        num_warps=4,
        **overlap(x.device),
    )
    return out[0] if shape.parts == 1 else out


def skinny_shape(rows: int, columns: int, depth: int) -> SkinnyShape | None:
    """The fastest (H200); None: the library's product is faster, or the sum has no such parts."""
    if rows > MOST_ROWS:
        return None
    tiles = -(-columns // 64)
    parts = max(1, min(8, round(132 / tiles)))
    while depth % (parts * 128):
        parts -= 1
        if not parts:
            return None
    return SkinnyShape(columns=64, depth=128, stages=4, parts=parts)
