# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Products of few rows with a weight matrix in Triton: as fast as the weights can be read.

A program has some columns of the result and a part of the sum. When all of its weights are there
it sends for those of the next product, so that the memory is busy while smaller kernels run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch(
    weight: tl.tensor,  # [columns, depth], contiguous
    columns: tl.tensor,
    depth: tl.tensor,
    parts: tl.tensor,  # of the depth
    piece_bytes: tl.tensor,  # of each part of each column, a multiple of 16; 0: nothing
) -> None:
    """Into the L2 cache, by all programs together; nobody waits for it."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    pieces = tl.where(piece_bytes > 0, columns * parts, 0)
    for first in range(program * 128, pieces, programs * 128):
        piece = tl.minimum(first + tl.arange(0, 128), pieces - 1)
        place = weight + (piece // parts).to(tl.int64) * depth + piece % parts * (depth // parts)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [place, tl.zeros([128], tl.int32) + piece_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(
    do_not_specialize=["rows", "next_columns", "next_depth", "next_parts", "next_bytes"],
    do_not_specialize_on_alignment=["bias", "next_weight"],
)
def skinny_kernel(
    x: tl.tensor_descriptor,  # [rows, depth], blocks of [ROWS, DEPTH]
    weight: tl.tensor_descriptor,  # [columns, depth], blocks of [COLUMNS, DEPTH]
    bias: tl.tensor,  # [columns]; unread without BIAS
    out: tl.tensor,  # [parts, rows, columns]: parts of the sum
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    part: tl.tensor,  # of the depth
    next_weight: tl.tensor,  # [next_columns, next_depth] of the product after this one
    next_columns: tl.tensor,
    next_depth: tl.tensor,
    next_parts: tl.tensor,
    next_bytes: tl.tensor,  # of each part of each of its columns, that are sent for
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    first = tl.program_id(0) * COLUMNS
    start = tl.program_id(1) * part
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in tl.range(start, start + part, DEPTH, num_stages=STAGES):
        b = weight.load([first, at])
        a = x.load([0, at])  # zeros beyond the end
        if WIDEN:  # the interpreter's bf16 product is wrong
            left, right = b.to(tl.float32), a.to(tl.float32)
            sums = tl.dot(left, right.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(b, a.T, sums)
    if OVERLAP:
        _prefetch(next_weight, next_columns, next_depth, next_parts, next_bytes)
    column = first + tl.arange(0, COLUMNS)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    if BIAS:
        added = tl.load(bias + column, column < columns, other=0.0).to(tl.float32)
        sums += tl.where(tl.program_id(1) == 0, added, 0.0)
    place = out + (tl.program_id(1) * rows + row).to(tl.int64) * columns + column
    tl.store(place, sums.to(out.dtype.element_ty), (row < rows) & (column < columns))
