# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""The copy of tokens in Triton: K and V in one launch."""

import triton
import triton.language as tl

from stemserve.kernels.token_sources import EMPTY as _EMPTY_SOURCE

_EMPTY = tl.constexpr(_EMPTY_SOURCE)


@triton.jit(do_not_specialize=["count"])  # of any step
def gather_tokens(
    sources,  # [count] slot of the pool; -1 - row; EMPTY
    k_slots,  # [slots, WIDTH]
    v_slots,
    k_rows,  # [rows, WIDTH], rows k_row_stride apart
    v_rows,
    k_out,  # [count, WIDTH]
    v_out,
    count,
    k_row_stride,
    v_row_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # the power of two that holds WIDTH
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    source = tl.load(sources + token, mask=inside, other=_EMPTY)
    column = tl.arange(0, COLUMNS)[None, :]
    used = column < WIDTH
    slot = source.to(tl.int64)[:, None] * WIDTH + column  # pools pass 2^31 elements
    in_pool = (source >= 0)[:, None] & used
    row = (-1 - source).to(tl.int64)[:, None]
    in_rows = ((source < 0) & (source > _EMPTY))[:, None] & used
    k = tl.load(k_slots + slot, mask=in_pool, other=0.0)
    v = tl.load(v_slots + slot, mask=in_pool, other=0.0)
    k_own = tl.load(k_rows + row * k_row_stride + column, mask=in_rows, other=0.0)
    v_own = tl.load(v_rows + row * v_row_stride + column, mask=in_rows, other=0.0)
    target = token.to(tl.int64)[:, None] * WIDTH + column
    written = inside[:, None] & used
    # Pages may keep float8.
    k = k.to(k_out.dtype.element_ty)
    v = v.to(v_out.dtype.element_ty)
    tl.store(k_out + target, tl.where(in_pool, k, k_own), mask=written)
    tl.store(v_out + target, tl.where(in_pool, v, v_own), mask=written)
