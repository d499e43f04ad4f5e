"""Matrix products on a CUDA device whose rows do not depend on how many rows there are.

A library picks a kernel by the number of rows, and kernels add up in different orders. Here every
tile has the same order of sums, and a row has the same bits alone and among thousands.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stemserve.kernels.fixed import fixed_product_triton
from stemserve.kernels.fused.fused_logits import has_aligned_rows, programs_of

KERNELS: Any = fixed_product_triton  # untyped: device code


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    rows: int
    outputs: int
    depth: int  # of the loads; the sums go on in the same order whatever it is
    warps: int
    stages: int
    group: int = 8  # tiles of rows that share their weights


FLOAT32 = ProductTile(rows=32, outputs=64, depth=32, warps=4, stages=2)
MANY_ROWS = ProductTile(rows=128, outputs=256, depth=64, warps=8, stages=3)
SOME_ROWS = ProductTile(rows=128, outputs=128, depth=64, warps=8, stages=4)
FEW_ROWS = ProductTile(rows=64, outputs=64, depth=128, warps=4, stages=4)
FEW_OUTPUTS = ProductTile(rows=64, outputs=32, depth=128, warps=4, stages=5)
TILES = (MANY_ROWS, SOME_ROWS, FEW_ROWS, FEW_OUTPUTS)


def product_tile(rows: int, outputs: int, itemsize: int, programs: int) -> ProductTile:
    """The largest tile that leaves no processor without work, or the smallest."""
    if itemsize > 2:
        return FLOAT32
    for tile in TILES[:-1]:
        fits = rows > tile.rows // 2 or tile.rows == FEW_ROWS.rows
        if fits and -(-rows // tile.rows) * -(-outputs // tile.outputs) >= programs:
            return tile
    return FEW_OUTPUTS


def fixed_product(
    x: Tensor,  # [rows, width], rows may be strided
    weight: Tensor,  # [outputs, width], contiguous, of the same type
    bias: Tensor | None = None,  # [outputs]
    *,
    out_dtype: torch.dtype | None = None,  # None: that of x
    tile: ProductTile | None = None,  # None: the fastest
) -> Tensor:  # [rows, outputs]
    """x @ weight.T + bias, summed in float32 and rounded once."""
    (rows, width), outputs = x.shape, len(weight)
    if x.stride(1) != 1 or not weight.is_contiguous() or weight.dtype != x.dtype:
        raise ValueError("rows and weights must be of one type, numbers side by side")
    if not (has_aligned_rows(x) and has_aligned_rows(weight)):
        raise ValueError(f"rows of {width} numbers must start at multiples of 16 bytes")
    out = x.new_empty((rows, outputs), dtype=out_dtype or x.dtype)
    if not out.numel():
        return out
    programs = programs_of(x.device)
    tile = tile or product_tile(rows, outputs, x.dtype.itemsize, programs)
    tiles = -(-rows // tile.rows) * -(-outputs // tile.outputs)
    KERNELS.product_kernel[(min(tiles, programs),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.depth]),
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        width,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        GROUP=tile.group,
        BIAS=bias is not None,
        WIDEN=x.dtype == torch.float32 or x.device.type == "cpu",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
