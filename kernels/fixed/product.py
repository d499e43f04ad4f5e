"""Matrix products on a CUDA device whose rows do not depend on how many rows there are.

A library picks a kernel by the number of rows, and kernels add up in different orders. Here every
tile has the same order of sums, and a row has the same bits alone and among thousands.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stemserve.kernels.fixed import product_triton
from stemserve.kernels.fused.logits import has_aligned_rows, programs_of

KERNELS: Any = product_triton  # untyped: device code


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """Costs are those of one H200, in microseconds; with them a launch is predicted to 10 %."""

    rows: int
    outputs: int
    depth: int  # of the loads; the sums go on in the same order whatever it is
    warps: int
    stages: int
    start_us: float = 0.0  # of a launch
    step_us: float = 0.0  # of a tile, for 1,024 numbers of the width
    group: int = 8  # tiles of rows that share their weights

    def seconds(self, rows: int, outputs: int, width: int, programs: int) -> float:
        """Programs work in turns, tile after tile."""
        turns = -(-self.count(rows, outputs) // programs)
        return 1e-6 * (self.start_us + turns * self.step_us * width / 1024)

    def count(self, rows: int, outputs: int) -> int:
        return -(-rows // self.rows) * -(-outputs // self.outputs)


# All of them have the same instruction add up 16 products at a time, from the start of the width to
# its end: their bits are the same, which tests on a GPU see to.
TILES = (
    ProductTile(rows=64, outputs=16, depth=256, warps=4, stages=4, start_us=3.0, step_us=1.3),
    ProductTile(rows=64, outputs=32, depth=128, warps=4, stages=5, start_us=2.5, step_us=1.95),
    ProductTile(rows=64, outputs=64, depth=128, warps=4, stages=4, start_us=2.6, step_us=2.6),
    ProductTile(rows=64, outputs=128, depth=64, warps=4, stages=4, start_us=3.2, step_us=4.1),
    ProductTile(rows=64, outputs=256, depth=64, warps=4, stages=3, start_us=4.3, step_us=6.5),
    ProductTile(rows=128, outputs=128, depth=64, warps=4, stages=4, start_us=3.7, step_us=5.2),
    ProductTile(rows=128, outputs=256, depth=64, warps=8, stages=3, start_us=4.9, step_us=9.0),
)
WIDE_TILES = TILES[:-1]  # for float32 results, which take shared memory of their own
FLOAT32 = ProductTile(rows=32, outputs=64, depth=32, warps=4, stages=2)
CHECKED_ROWS = 130


@functools.lru_cache(maxsize=4096)
def product_tile(
    rows: int, outputs: int, width: int, programs: int, tiles: tuple[ProductTile, ...] = TILES
) -> ProductTile:
    """The fastest one."""
    return min(tiles, key=lambda tile: tile.seconds(rows, outputs, width, programs))


def _tiles(weight: Tensor, out_dtype: torch.dtype) -> tuple[ProductTile, ...]:
    # The interpreter adds up in another order for each depth.
    if weight.dtype.itemsize > 2 or weight.device.type == "cpu":
        return (FLOAT32,)
    return TILES if out_dtype.itemsize == 2 else WIDE_TILES


def tiles_agree(
    weight: Tensor,  # [outputs, width]
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> bool:
    """Whether all tiles give rows the same bits on this device; compiles them, too."""
    generator = torch.Generator(weight.device).manual_seed(CHECKED_ROWS)
    shape = (CHECKED_ROWS, weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    tiles = _tiles(weight, out_dtype or weight.dtype)
    found = [fixed_product(x, weight, bias, out_dtype=out_dtype, tile=tile) for tile in tiles]
    return all(torch.equal(other, found[0]) for other in found)


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
    tiles = _tiles(weight, out.dtype)
    tile = tile or product_tile(rows, outputs, width, programs, tiles)
    KERNELS.product_kernel[(min(tile.count(rows, outputs), programs),)](
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
