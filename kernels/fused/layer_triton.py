# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""What a decoder layer does between its matrix products, in Triton: one launch each.

Sums are float32; every result is rounded once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)  # of e4m3; the hardware's cast gives NaN above it


@triton.jit
def _begin(OVERLAP: tl.constexpr) -> None:
    """The next kernel may start; this one goes on when the one before is done."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _added_up(place: tl.tensor, mask: tl.tensor, part: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Parts of a sum, every `part` elements; of one part as it is stored, else float32."""
    value = tl.load(place, mask, other=0.0)
    for number in tl.static_range(1, PARTS):
        value += tl.load(place + number * part, mask, other=0.0)
    return value


@triton.jit
def norm_kernel(
    x: tl.tensor,  # [PARTS, rows, HIDDEN], a row every x_stride elements, a part every x_part
    residual: tl.tensor,  # [rows, HIDDEN] contiguous, changed in place; unread without ADD
    weight: tl.tensor,  # [HIDDEN]
    out: tl.tensor,  # [rows, HIDDEN] contiguous
    x_stride: tl.tensor,
    x_part: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    _begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    value = _added_up(x + row * x_stride + at, inside, x_part, PARTS).to(tl.float32)
    gain = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * HIDDEN + at
        value += tl.load(place, inside, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(place, stored, inside)
        value = stored.to(tl.float32)  # the norm is of what later layers read
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(out + row * HIDDEN + at, (value * scale * gain).to(out.dtype.element_ty), inside)


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,  # [PARTS, rows, 2 * WIDTH], a row every stride elements, a part every part
    out: tl.tensor,  # [rows, WIDTH] contiguous
    stride: tl.tensor,
    part: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    _begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    source = gate_up + row * stride + at
    gate = _added_up(source, inside, part, PARTS).to(tl.float32)
    up = _added_up(source + WIDTH, inside, part, PARTS).to(tl.float32)
    value = gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def _page_number(value: tl.tensor, scale: tl.tensor, pages: tl.tensor, FP8: tl.constexpr):
    """As it is stored in a page."""
    if FP8:
        value = tl.minimum(tl.maximum(value.to(tl.float32) / scale, -FP8_MAX), FP8_MAX)
    return value.to(pages.dtype.element_ty)


@triton.jit
def _store_halves(
    place: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> None:
    tl.store(place, first, mask)
    tl.store(place + HALF, second, mask)


# Parts of uploaded arrays, which start anywhere: no second compilation for that.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_indptr", "slots"])
def heads_kernel(
    qkv: tl.tensor,  # [PARTS, rows, QUERY_HEADS + 2 * KV_HEADS, 2 * HALF], a row every qkv_stride
    norm: tl.tensor,  # [QUERY_HEADS + KV_HEADS, 2 * HALF]; unread without NORM
    table: tl.tensor,  # [positions, 2, HALF] float32: cosines, sines
    positions: tl.tensor,  # [rows]
    slot_indptr: tl.tensor,  # [rows + 1]; unread without SEVERAL
    slots: tl.tensor,  # [rows], or [slot_indptr[-1]]; -1: not stored; unread without STORE
    q: tl.tensor,  # [rows, QUERY_HEADS, 2 * HALF]
    k: tl.tensor,  # [rows, KV_HEADS, 2 * HALF]
    v: tl.tensor,
    k_pages: tl.tensor,  # [slots, KV_HEADS, 2 * HALF]; unwritten without STORE
    v_pages: tl.tensor,
    qkv_stride: tl.tensor,
    qkv_part: tl.tensor,
    eps: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    SEVERAL: tl.constexpr,
    FP8: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    _begin(OVERLAP)
    DIM: tl.constexpr = 2 * HALF
    ROTATED: tl.constexpr = QUERY_HEADS + KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < ROTATED + KV_HEADS) & (dim < HALF)
    turns = inside & (head < ROTATED)
    source = qkv + row * qkv_stride + head * DIM + dim
    first = _added_up(source, inside, qkv_part, PARTS)
    second = _added_up(source + HALF, inside, qkv_part, PARTS)
    angle = table + tl.load(positions + row).to(tl.int64) * DIM + dim
    cos = tl.load(angle, dim < HALF, other=0.0)
    sin = tl.load(angle + HALF, dim < HALF, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / DIM + eps)[:, None]
        gain = norm + head * DIM + dim
        a *= scale * tl.load(gain, turns, other=0.0).to(tl.float32)
        b *= scale * tl.load(gain + HALF, turns, other=0.0).to(tl.float32)
    first = first.to(v.dtype.element_ty)
    second = second.to(v.dtype.element_ty)
    left = (a * cos - b * sin).to(q.dtype.element_ty)
    right = (b * cos + a * sin).to(q.dtype.element_ty)
    is_q = inside & (head < QUERY_HEADS)
    is_k = turns & (head >= QUERY_HEADS)
    is_v = inside & (head >= ROTATED)
    k_at = (head - QUERY_HEADS) * DIM + dim
    v_at = (head - ROTATED) * DIM + dim
    _store_halves(q + row * (QUERY_HEADS * DIM) + head * DIM + dim, left, right, is_q, HALF)
    _store_halves(k + row * (KV_HEADS * DIM) + k_at, left, right, is_k, HALF)
    _store_halves(v + row * (KV_HEADS * DIM) + v_at, first, second, is_v, HALF)
    if STORE:
        begin = row
        end = row + 1
        if SEVERAL:
            begin = tl.load(slot_indptr + row).to(tl.int64)
            end = tl.load(slot_indptr + row + 1).to(tl.int64)
        for place in range(begin, end):
            slot = tl.load(slots + place).to(tl.int64)
            if slot >= 0:
                k_place = k_pages + slot * (KV_HEADS * DIM) + k_at
                v_place = v_pages + slot * (KV_HEADS * DIM) + v_at
                k_left = _page_number(left, k_scale, k_pages, FP8)
                k_right = _page_number(right, k_scale, k_pages, FP8)
                v_left = _page_number(first, v_scale, v_pages, FP8)
                v_right = _page_number(second, v_scale, v_pages, FP8)
                _store_halves(k_place, k_left, k_right, is_k, HALF)
                _store_halves(v_place, v_left, v_right, is_v, HALF)
