# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""A matrix product in Triton that adds up every number of the result in the same order."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x: tl.tensor_descriptor,  # [rows, width], blocks of [ROWS, DEPTH]
    weight: tl.tensor_descriptor,  # [outputs, width], blocks of [OUTPUTS, DEPTH]
    bias: tl.tensor,  # [outputs]; unread without BIAS
    out: tl.tensor,  # [rows, outputs] contiguous
    rows: tl.tensor,
    outputs: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One sum a number, over the width from its start to its end; beyond both ends are zeros."""
    row_tiles = tl.cdiv(rows, ROWS)
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    group_tiles = GROUP * output_tiles
    tiles = row_tiles * output_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        # Programs that run together read few different rows and few different weights.
        first = tile // group_tiles * GROUP
        high = min(row_tiles - first, GROUP)
        first_row = (first + tile % group_tiles % high) * ROWS
        first_output = tile % group_tiles // high * OUTPUTS
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, width, DEPTH):
            a = x.load([first_row, start])
            b = weight.load([first_output, start])
            if WIDEN:  # the interpreter's bf16 product is wrong; fp32 must not be rounded to tf32
                left, right = a.to(tl.float32), b.to(tl.float32)
                total = tl.dot(left, right.T, total, input_precision="ieee")
            else:
                total = tl.dot(a, b.T, total)
        row = first_row + tl.arange(0, ROWS)
        output = first_output + tl.arange(0, OUTPUTS)
        if BIAS:
            total += tl.load(bias + output, output < outputs, other=0.0).to(tl.float32)[None, :]
        place = row.to(tl.int64)[:, None] * outputs + output[None, :]
        inside = (row < rows)[:, None] & (output < outputs)[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), inside)
