# Device code: Gluon gives these functions their types when it compiles them.
# type: ignore
"""Attention of 128-row tiles over runs of tokens, for Hopper: one launch for all of a forest.

A CTA walks items, an item being a tile of query rows and a query head. A producer warp loads Q, K
and V by TMA; two consumer warpgroups have 64 rows each. A consumer issues Q K of a block together
with P V of the block before, and its softmax overlaps the latter (FlashAttention-3's schedule,
arXiv 2407.08608).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stemserve.kernels.dense.tables import BLOCK_FIELDS as _BLOCK_FIELDS
from stemserve.kernels.dense.tables import BLOCK_TOKENS as _BLOCK_TOKENS
from stemserve.kernels.dense.tables import COPIED as _COPIED
from stemserve.kernels.dense.tables import ITEM_FIELDS as _ITEM_FIELDS
from stemserve.kernels.dense.tables import MASKED as _MASKED
from stemserve.kernels.dense.tables import OWN as _OWN
from stemserve.kernels.dense.tables import TILE_ROWS as _TILE_ROWS

BLOCK_FIELDS = gl.constexpr(_BLOCK_FIELDS)
ITEM_FIELDS = gl.constexpr(_ITEM_FIELDS)
TOKENS = gl.constexpr(_BLOCK_TOKENS)
HALF = gl.constexpr(_TILE_ROWS // 2)
COPIED = gl.constexpr(_COPIED)
MASKED = gl.constexpr(_MASKED)
OWN = gl.constexpr(_OWN)
LN2 = gl.constexpr(0.6931471805599453)
NO_SCORE = gl.constexpr(-1e30)  # finite, so that a difference of two is no NaN


@gluon.jit
def _load_block(rows, copies, at, column, copied, full, empty, buffer, parity, DIM: gl.constexpr):
    mbarrier.wait(empty, parity)
    mbarrier.expect(full, TOKENS * DIM * 2)
    tma.async_copy_global_to_shared(copies, [at, column], full, buffer, pred=copied != 0)
    tma.async_copy_global_to_shared(rows, [at, column], full, buffer, pred=copied == 0)


@gluon.jit
def _produce(
    sources,
    buffers,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    q, k_rows, v_rows, k_copies, v_copies, items, blocks, rounds = sources
    q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    count = 0
    first_item = gl.program_id(0) * rounds
    for place in range(rounds):
        record = items + (first_item + place) * ITEM_FIELDS
        row = gl.load(record)
        shared_start = gl.load(record + 2)
        shared = gl.load(record + 3)
        own_start = gl.load(record + 4) - shared
        steps = shared + gl.load(record + 5)
        head = gl.load(record + 7)
        if steps > 0:
            slot = place & 1
            full = q_full.index(slot)
            mbarrier.wait(q_empty.index(slot), ((place >> 1) & 1) ^ 1)
            mbarrier.expect(full, 2 * HALF * DIM * 2)
            for half in gl.static_range(2):
                queries = q_ring.index(slot * 2 + half)
                tma.async_copy_global_to_shared(q, [row + half * HALF, head * DIM], full, queries)
            column = head // GROUP * DIM
            for step in range(steps):
                first = gl.where(step < shared, shared_start, own_start)
                block = blocks + (first + step) * BLOCK_FIELDS
                at = gl.load(block)
                copied = gl.load(block + 3) & COPIED
                i = count % STAGES
                parity = ((count // STAGES) & 1) ^ 1
                full = k_full.index(i)
                empty = k_empty.index(i)
                k = k_ring.index(i)
                _load_block(k_rows, k_copies, at, column, copied, full, empty, k, parity, DIM)
                full = v_full.index(i)
                empty = v_empty.index(i)
                v = v_ring.index(i)
                _load_block(v_rows, v_copies, at, column, copied, full, empty, v, parity, DIM)
                count += 1


@gluon.jit
def _masked(s, info, block, row, first, seen, SL: gl.constexpr):
    """Of its own block, row r sees the rows first .. r; of another one, what it has `seen`."""
    if (info & MASKED) != 0:
        at = gl.load(block)
        own = (info & OWN) != 0
        start = gl.where(own, first - at, 0)
        stop = gl.minimum(gl.load(block + 2), seen - gl.load(block + 1))
        stop = gl.where(own, row + 1 - at, stop)
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, SL))
        shown = (token[None, :] >= start[:, None]) & (token[None, :] < stop[:, None])
        s = gl.where(shown, s, -float("inf"))
    return s


@gluon.jit
def _softmax(s, peak, total, scale, AL: gl.constexpr, OL: gl.constexpr, DT: gl.constexpr):
    higher = gl.maximum(peak, gl.max(s, 1))
    fade = gl.exp2((peak - higher) * scale)
    p = gl.exp2(s * scale - (higher * scale)[:, None])
    total = total * fade + gl.sum(p, 1)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, OL))[:, None]
    return gl.convert_layout(p.to(DT), AL), higher, total, fade


@gluon.jit
def _consume(
    tables,
    buffers,
    WHICH: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    out, lse, row_first, row_seen, items, blocks, rounds, scale = tables
    q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16]
    )
    AL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    DT: gl.constexpr = out.dtype.element_ty
    half_row = gl.arange(0, HALF, gl.SliceLayout(1, SL))
    out_row = gl.arange(0, HALF, gl.SliceLayout(1, OL))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, OL))
    zero = gl.zeros([HALF, TOKENS], gl.float32, SL)
    count = 0
    first_item = gl.program_id(0) * rounds
    for place in range(rounds):
        record = items + (first_item + place) * ITEM_FIELDS
        base = gl.load(record) + WHICH * HALF
        target = gl.load(record + 6) + WHICH * HALF
        rows = gl.load(record + 1) - WHICH * HALF
        shared_start = gl.load(record + 2)
        shared = gl.load(record + 3)
        own_start = gl.load(record + 4) - shared
        steps = shared + gl.load(record + 5)
        head = gl.load(record + 7)
        if steps > 0:
            row = base + half_row
            first = gl.load(row_first + row, mask=half_row < rows, other=0)
            seen = gl.load(row_seen + row, mask=half_row < rows, other=0)
            peak = gl.full([HALF], NO_SCORE, gl.float32, gl.SliceLayout(1, SL))
            total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SL))
            acc = gl.zeros([HALF, DIM], gl.float32, OL)
            slot = place & 1
            queries = q_ring.index(slot * 2 + WHICH)
            mbarrier.wait(q_full.index(slot), (place >> 1) & 1)
            i = count % STAGES
            block = blocks + gl.where(shared > 0, shared_start, own_start) * BLOCK_FIELDS
            info = gl.load(block + 3)
            mbarrier.wait(k_full.index(i), (count // STAGES) & 1)
            s = warpgroup_mma(queries, k_ring.index(i).permute((1, 0)), zero, use_acc=False)
            mbarrier.arrive(k_empty.index(i), count=1)
            s = _masked(s, info, block, row, first, seen, SL)
            p, peak, total, fade = _softmax(s, peak, total, scale, AL, OL, DT)
            if steps > 1:
                mbarrier.wait(k_full.index((count + 1) % STAGES), ((count + 1) // STAGES) & 1)
            for step in range(1, steps):
                at = count + step
                i = at % STAGES
                before = (at - 1) % STAGES
                block_at = gl.where(step < shared, shared_start, own_start) + step
                block = blocks + block_at * BLOCK_FIELDS
                info = gl.load(block + 3)
                s_next = warpgroup_mma(
                    queries, k_ring.index(i).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                mbarrier.wait(v_full.index(before), ((at - 1) // STAGES) & 1)
                acc_next = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s_next])
                mbarrier.arrive(k_empty.index(i), count=1)
                s = _masked(s, info, block, row, first, seen, SL)
                p_next, peak, total, fade = _softmax(s, peak, total, scale, AL, OL, DT)
                # The wait for the next keys ends a block of instructions here; without it the
                # assembler waits for P V first, and nothing overlaps.
                mbarrier.wait(
                    k_full.index((at + 1) % STAGES), ((at + 1) // STAGES) & 1, pred=step + 1 < steps
                )
                acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
                mbarrier.arrive(v_empty.index(before), count=1)
                acc = acc * fade
                p = p_next
            mbarrier.arrive(q_empty.index(slot), count=1)
            count += steps
            i = (count - 1) % STAGES
            mbarrier.wait(v_full.index(i), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_ring.index(i), acc)
            mbarrier.arrive(v_empty.index(i), count=1)
            inverse = gl.where(total > 0.0, 1.0 / total, 0.0)
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
            to = (target + out_row).to(gl.int64) * HEADS + head
            pointers = out + to[:, None] * DIM + dim[None, :]
            gl.store(pointers, acc.to(DT), mask=(out_row < rows)[:, None])
            log = (peak * scale + gl.log2(gl.maximum(total, 1e-30))) * LN2
            log = gl.where(total > 0.0, log, -float("inf"))
            gl.store(lse + (target + half_row) * HEADS + head, log, mask=half_row < rows)


@gluon.jit(do_not_specialize=["rounds"])
def dense_kernel(
    q,  # [rows, HEADS * DIM]
    k_rows,  # [rows, KV_HEADS * DIM] of the step
    v_rows,
    k_copies,  # [tokens, KV_HEADS * DIM] out of the pages
    v_copies,
    out,  # [rows and partial rows, HEADS, DIM]
    lse,  # [rows and partial rows, HEADS] natural log
    row_first,  # the plan's tables; see tables.py
    row_seen,
    items,
    blocks,
    rounds,  # items of a CTA
    scale,  # to base 2
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    DT: gl.constexpr = out.dtype.element_ty
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_ring = gl.allocate_shared_memory(DT, [4, HALF, DIM], L)
    k_ring = gl.allocate_shared_memory(DT, [STAGES, TOKENS, DIM], L)
    v_ring = gl.allocate_shared_memory(DT, [STAGES, TOKENS, DIM], L)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    tables = (out, lse, row_first, row_seen, items, blocks, rounds, scale)
    buffers = (q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sources = (q, k_rows, v_rows, k_copies, v_copies, items, blocks, rounds)
    gl.warp_specialize(
        [
            (_consume, (tables, buffers, 0, HEADS, DIM, STAGES)),
            (_consume, (tables, buffers, 1, HEADS, DIM, STAGES)),
            (_produce, (sources, buffers, HEADS // KV_HEADS, DIM, STAGES)),
        ],
        [4, 1],  # warps of the others than the first, and their registers
        [240, 24],
    )
