# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""The merge of partial attention results in Triton (POR of the CoDec paper): any rows into any."""

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(-1e30)  # finite, so that a difference of two is no NaN


@triton.jit(do_not_specialize=["columns"])  # of any plan
def merge_rows(
    parts,  # [merged rows, columns] rows of outs; -1: none
    outs,  # [rows, HEADS, DIM]
    lses,  # [rows, HEADS] natural log; without a key -inf, +inf or NaN
    targets,  # [merged rows]
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS]
    columns,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # the power of two that holds DIM
    BLOCK: tl.constexpr,  # heads of a program
    PROGRAMS: tl.constexpr,  # of a row
):
    row = tl.program_id(0) // PROGRAMS
    head = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    inside = head < HEADS
    dim = tl.arange(0, COLUMNS)
    peak = tl.full([BLOCK], NO_SCORE, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for column in range(columns):
        part = tl.load(parts + row * columns + column)
        at = part.to(tl.int64) * HEADS + head
        log = tl.load(lses + at, mask=inside & (part >= 0), other=-float("inf"))
        sees = (log > -float("inf")) & (log < float("inf"))
        log = tl.where(sees, log, NO_SCORE)
        # An empty part may hold anything: its values are not loaded.
        loaded = sees[:, None] & (dim < DIM)[None, :]
        value = tl.load(outs + at[:, None] * DIM + dim[None, :], mask=loaded, other=0.0)
        higher = tl.maximum(peak, log)
        fade = tl.exp(peak - higher)
        weight = tl.where(sees, tl.exp(log - higher), 0.0)
        acc = acc * fade[:, None] + value.to(tl.float32) * weight[:, None]
        total = total * fade + weight
        peak = higher
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    target = tl.load(targets + row).to(tl.int64) * HEADS + head
    result = (acc / safe[:, None]).to(out.dtype.element_ty)
    written = inside[:, None] & (dim < DIM)[None, :]
    tl.store(out + target[:, None] * DIM + dim[None, :], result, mask=written)
    tl.store(lse + target, tl.where(blind, -float("inf"), peak + tl.log(safe)), mask=inside)
