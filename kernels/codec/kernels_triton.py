# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Tree decode in Triton: a kernel over the pieces of a plan, and the merge of partial results.

A CTA (one KV head, one bin) walks its pieces. A piece holds 64 rows (query row times query head of
the KV head) against a stream of pages; each page carries the range of rows that may see it. A piece
whose rows are in no other piece writes the result; the others write softmax-normalised partial
results with their base-2 log-sum-exp, and the merge adds them up in the plan's order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stemserve.kernels.codec.pieces import RECORD as _RECORD
from stemserve.kernels.codec.tiles import MASKED as _MASKED
from stemserve.kernels.codec.tiles import PAGE_BITS as _PAGE_BITS
from stemserve.kernels.codec.tiles import STEP_TOKENS as _STEP_TOKENS
from stemserve.kernels.codec.tiles import TILE_ROWS as _TILE_ROWS

RECORD = tl.constexpr(_RECORD)
MASKED = tl.constexpr(_MASKED)
PAGE_BITS = tl.constexpr(_PAGE_BITS)
PAGE_MASK = tl.constexpr((1 << _PAGE_BITS) - 1)
WORD_MASK = tl.constexpr((1 << 31) - 1)  # without the sign, which marks a page of rows
TILE_ROWS = tl.constexpr(_TILE_ROWS)
STEP_TOKENS = tl.constexpr(_STEP_TOKENS)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1e30)  # finite, so that a difference of two is no NaN


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    if WIDEN:  # the interpreter's bf16 product is wrong; fp32 must not be rounded to tf32
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _masked(
    s: tl.tensor,  # [TILE_ROWS, pages a step, PAGE] scores
    mask: tl.tensor,  # [pages a step]
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Of each page a row sees the first tokens, or none."""
    row = tl.arange(0, TILE_ROWS)[:, None]
    low = (mask & 255)[None, :]
    inside = (row >= low) & (row < ((mask >> 8) & 255)[None, :])
    causal = (row // GROUP - low // GROUP) * ((mask >> 23) & 1)[None, :]
    seen = tl.where(inside, ((mask >> 16) & 127)[None, :] + causal, 0)
    return tl.where(tl.arange(0, PAGE)[None, None, :] < seen[:, :, None], s, -float("inf"))


@triton.jit
def _windowed(
    s: tl.tensor,  # [TILE_ROWS, pages a step, PAGE] scores
    start: tl.tensor,  # [TILE_ROWS] place of the first token that the row sees
    position: tl.tensor,  # [pages a step] place of the page's first token
    PAGE: tl.constexpr,
) -> tl.tensor:
    least = start[:, None] - position[None, :]
    return tl.where(tl.arange(0, PAGE)[None, None, :] >= least[:, :, None], s, -float("inf"))


@triton.jit(do_not_specialize=["partial_rows"])
def tree_kernel(
    q: tl.tensor,  # [rows, HEADS, DIM], a row every q_stride elements
    k_pages: tl.tensor,  # [pages, PAGE, KV_HEADS, DIM]
    v_pages: tl.tensor,
    k_rows: tl.tensor,  # with items, [rows, KV_HEADS, DIM], a row every k_row_stride elements
    v_rows: tl.tensor,
    records: tl.tensor,  # the plan's tables; see pieces.py
    words: tl.tensor,
    masks: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    partial_out: tl.tensor,  # [KV_HEADS, partial_rows, DIM]
    partial_lse: tl.tensor,  # [KV_HEADS, partial_rows], base 2
    out: tl.tensor,  # [rows, HEADS, DIM]
    lse: tl.tensor,  # [rows, HEADS], natural log
    q_stride: tl.tensor,
    k_row_stride: tl.tensor,
    v_row_stride: tl.tensor,
    partial_rows: tl.tensor,
    scale: tl.tensor,  # positive, to base 2; of a capped score, to base 2
    cap_scale: tl.tensor,  # with a soft cap: from q . k to twice the argument of tanh, to base 2
    v_scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # only now: the merge reads the tables before it waits
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGES: tl.constexpr = STEP_TOKENS // PAGE
    SIZE: tl.constexpr = RECORD + 2 * PAGES + (TILE_ROWS + GROUP - 1) // GROUP
    head = tl.program_id(0) % KV_HEADS  # the heads of one piece run together: they share DRAM pages
    piece = tl.program_id(0) // KV_HEADS
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, DIM_PAD)
    token = tl.arange(0, STEP_TOKENS)
    page = tl.arange(0, PAGES)
    vector = (token % PAGE) * KV_HEADS + head
    whole = (token % PAGE + 1) << PAGE_BITS  # the least word of a page whose token is to be loaded
    k_dims = k_pages + dim
    v_dims = v_pages + dim
    while piece >= 0:
        record = records + piece * SIZE
        steps = tl.load(record + 2)
        first = tl.load(record + 3)
        partial = tl.load(record + 4) + head * partial_rows
        low = tl.load(record + 5)
        high = tl.load(record + 6)
        direct = tl.load(record + 7)
        piece = tl.load(record + 8)
        word = tl.load(record + RECORD + token // PAGE)
        mask = tl.load(record + RECORD + PAGES + page)
        # Rows that the tile does not have repeat others: a mask would cost a dependent load.
        at = tl.load(record + RECORD + 2 * PAGES + row // GROUP).to(tl.int64)
        query_head = head * GROUP + row % GROUP
        query = at * q_stride + query_head * DIM
        tile = tl.load(q + query[:, None] + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
        at = at * HEADS + query_head
        if WINDOW:
            inside = row < tl.load(record + 1)
            start = tl.load(starts + tl.load(record) + row // GROUP, mask=inside, other=0)
        peak = tl.full([TILE_ROWS], NO_SCORE, tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
        step_words = words + first * PAGES + token // PAGE
        step_masks = masks + first * PAGES
        for step in tl.range(0, steps, num_stages=STAGES):
            # Page words travel as loop variables: loaded in the step that uses them they would take
            # the pipeline's stages, and carried over two steps they would stop the pipelining.
            place = ((word & PAGE_MASK) * (PAGE * KV_HEADS) + vector).to(tl.int64) * DIM
            if HAS_ITEMS:  # a negative word is the number of the first row of a page of rows
                own_row = ((word & PAGE_MASK) + token % PAGE).to(tl.int64)
                k_own = k_rows + (own_row * k_row_stride + head * DIM)
                v_own = v_rows + (own_row * v_row_stride + head * DIM)
                k_at = tl.where(word < 0, k_own, k_pages + place)[:, None] + dim[None, :]
                v_at = tl.where(word < 0, v_own, v_pages + place)[:, None] + dim[None, :]
                word = word & WORD_MASK
            else:
                k_at = k_dims[None, :] + place[:, None]
                v_at = v_dims[None, :] + place[:, None]
            loaded = (word >= whole)[:, None]
            if DIM != DIM_PAD:
                loaded = loaded & (dim < DIM)[None, :]
            seen_by = mask
            word = tl.load(step_words + (step + 1) * PAGES)
            mask = tl.load(step_masks + (step + 1) * PAGES + page)
            k = tl.load(k_at, mask=loaded, other=0.0)
            v = tl.load(v_at, mask=loaded, other=0.0)
            s = tl.zeros([TILE_ROWS, STEP_TOKENS], tl.float32)
            s = _dot(tile, tl.trans(k.to(tile.dtype)), s, WIDEN)
            if SOFT_CAP:
                s = 1.0 - 2.0 / (tl.exp2(s * cap_scale) + 1.0)
            s = tl.reshape(s, [TILE_ROWS, PAGES, PAGE])
            if tl.max(seen_by, 0) >= MASKED:
                s = _masked(s, seen_by, GROUP, PAGE)
                if WINDOW:
                    position = tl.load(positions + (first + step) * PAGES + page)
                    s = _windowed(s, start, position, PAGE)
            s = tl.reshape(s, [TILE_ROWS, STEP_TOKENS])
            higher = tl.maximum(peak, tl.max(s, 1))
            fade = tl.exp2((peak - higher) * scale)
            p = tl.exp2(s * scale - (higher * scale)[:, None])
            total = total * fade + tl.sum(p, 1)
            acc = _dot(p.to(tile.dtype), v.to(tile.dtype), acc * fade[:, None], WIDEN)
            peak = higher
        result = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
        own = (row >= low) & (row < high)
        log = peak * scale + tl.log2(tl.maximum(total, 1e-30))
        log = tl.where(total > 0.0, log, -float("inf"))
        wide = own[:, None] & (dim < DIM)[None, :]
        if direct != 0:
            tl.store(out + at[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), wide)
            tl.store(lse + at, log * LN2, own)
        else:
            partial_at = (partial + row).to(tl.int64)
            part = result.to(partial_out.dtype.element_ty)
            tl.store(partial_out + partial_at[:, None] * DIM + dim[None, :], part, wide)
            tl.store(partial_lse + partial_at, log, own)


@triton.jit(do_not_specialize=["columns", "partial_rows"])
def merge_kernel(
    partial_out: tl.tensor,  # [KV_HEADS, partial_rows, DIM]
    partial_lse: tl.tensor,  # [KV_HEADS, partial_rows], base 2
    rows: tl.tensor,  # [rows] where each row goes
    merge_count: tl.tensor,  # [rows] partial rows of each, -1: written by the tree kernel
    merge: tl.tensor,  # [rows, columns]
    out: tl.tensor,  # [rows, HEADS, DIM]
    lse: tl.tensor,  # [rows, HEADS], natural log
    columns: tl.tensor,
    partial_rows: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OWN_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,  # a block holds all columns
    ROOMY: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One warp a program, for one head or all of a KV head. Only row vectors and scalars, so that
    nothing is exchanged between threads; a block's loads are all issued before its first use."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(1)
    head = tl.program_id(0) * OWN_HEADS
    dim = tl.arange(0, DIM_PAD)
    base = (head // GROUP).to(tl.int64) * partial_rows + head % GROUP
    count = tl.load(merge_count + row)
    target = tl.load(rows + row).to(tl.int64) * HEADS + head
    entries = merge + row * columns
    places = ()
    for place in tl.static_range(BLOCK):
        places = places + (tl.load(entries + place, mask=place < columns, other=-1),)
    if OVERLAP:  # what the tables say was written before the tree kernel began
        gdc_launch_dependents()
        gdc_wait()
    peaks = ()
    totals = ()
    accs = ()
    for _own in tl.static_range(OWN_HEADS):
        peaks = peaks + (tl.full([], NO_SCORE, tl.float32),)
        totals = totals + (tl.full([], 0.0, tl.float32),)
        accs = accs + (tl.zeros([DIM_PAD], tl.float32),)
    last = columns
    if ROOMY:  # otherwise nothing waits for the count
        last = count
    for start in range(0, last, BLOCK):
        logs = ()
        parts = ()
        for place in tl.static_range(BLOCK):
            at = places[place]
            for own in tl.static_range(OWN_HEADS):
                part_row = base + own + at
                log = tl.load(partial_lse + part_row, mask=at >= 0, other=-float("inf"))
                part = tl.load(
                    partial_out + part_row * DIM + dim, mask=(at >= 0) & (dim < DIM), other=0.0
                )
                logs = logs + (log,)
                parts = parts + (part,)
        new_places = places
        if not ONCE:
            new_places = ()
            for place in tl.static_range(BLOCK):
                following = start + BLOCK + place
                new_places = new_places + (
                    tl.load(entries + following, mask=following < columns, other=-1),
                )
        new_peaks = ()
        new_totals = ()
        new_accs = ()
        for own in tl.static_range(OWN_HEADS):
            higher = peaks[own]
            for place in tl.static_range(BLOCK):
                higher = tl.maximum(higher, logs[place * OWN_HEADS + own])
            fade = tl.exp2(peaks[own] - higher)
            total = totals[own] * fade
            acc = accs[own] * fade
            for place in tl.static_range(BLOCK):
                weight = tl.exp2(logs[place * OWN_HEADS + own] - higher)
                acc += parts[place * OWN_HEADS + own].to(tl.float32) * weight
                total += weight
            new_peaks = new_peaks + (higher,)
            new_totals = new_totals + (total,)
            new_accs = new_accs + (acc,)
        places = new_places
        peaks = new_peaks
        totals = new_totals
        accs = new_accs
    if count >= 0:
        for own in tl.static_range(OWN_HEADS):
            total = tl.maximum(totals[own], 1e-30)
            result = (accs[own] * (1.0 / total)).to(out.dtype.element_ty)
            tl.store(out + (target + own) * DIM + dim, result, dim < DIM)
            log = tl.where(totals[own] > 0.0, (peaks[own] + tl.log2(total)) * LN2, -float("inf"))
            tl.store(lse + target + own, log)
