# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""The merge of the levels of a cascade in Triton."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
NO_SCORE = tl.constexpr(-1e30)  # finite, so that a difference of two is no NaN


@triton.jit(do_not_specialize=["pairs"])  # of any step
def merge_levels(
    targets,  # [rows] row of the result
    outs,  # [levels, rows, heads, DIM]
    lses,  # [levels, rows, heads] to base 2
    seen,  # [rows] a bit for each level in which the row sees anything
    out,  # [rows, heads, DIM]
    lse,  # [rows, heads] natural
    pairs,  # rows * heads
    heads,
    LEVELS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # the power of two that holds DIM
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    row = pair // heads
    bits = tl.load(seen + row, mask=inside, other=0)
    column = tl.arange(0, COLUMNS)
    used = column < DIM
    peak = tl.full([PAIRS], NO_SCORE, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    acc = tl.zeros([PAIRS, COLUMNS], tl.float32)
    for level in range(LEVELS):
        sees = ((bits >> level) & 1) != 0
        at = pair.to(tl.int64) + tl.cast(pairs, tl.int64) * level
        score = tl.load(lses + at, mask=sees, other=NO_SCORE)
        new_peak = tl.maximum(peak, score)
        kept = tl.exp2(peak - new_peak)
        weight = tl.where(sees, tl.exp2(score - new_peak), 0.0)
        part = tl.load(
            outs + at[:, None] * DIM + column[None, :],
            mask=sees[:, None] & used[None, :],
            other=0.0,
        )
        acc = acc * kept[:, None] + part.to(tl.float32) * weight[:, None]
        total = total * kept + weight
        peak = new_peak
    blind = bits == 0
    safe = tl.where(blind, 1.0, total)
    target = tl.load(targets + row, mask=inside, other=0).to(tl.int64) * heads + pair % heads
    result = (acc / safe[:, None]).to(out.dtype.element_ty)
    written = inside[:, None] & used[None, :]
    tl.store(out + target[:, None] * DIM + column[None, :], result, mask=written)
    natural = (peak + tl.log2(safe)) * LN2
    tl.store(lse + target, tl.where(blind, -float("inf"), natural), mask=inside)
