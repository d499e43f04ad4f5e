# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Draws in Triton: what blocks of a row hold, then a token a row from the blocks that matter.

A row whose allowed tokens may lie outside its PICKS likeliest blocks is left to others.
"""

import triton
import triton.language as tl

from stemserve.kernels.sampling.search_triton import sampled_keys
from stemserve.kernels.sampling.tile_triton import (
    EVERY_TOKEN,
    LEAST,
    LOG2E,
    NOTHING,
    STATE,
    WIDE_SCANNED,
    WIDE_SEARCHED,
    WIDE_WHOLE,
    count_of,
    equals_wanted,
    find,
    find_in_tile,
    finish,
    kept,
    key_of,
    last_equal,
    load_tile,
    mass_of,
    row_summary,
    scale_of,
    slot_params,
    threshold_in,
    uniform,
    weight_at,
)


@triton.jit
def block_kernel(
    logits: tl.tensor,  # [rows, vocab] float32, a row every stride numbers
    slots: tl.tensor,  # [rows] int64
    table: tl.tensor,  # [slots + 1, WORDS] int64
    tops: tl.tensor,  # [rows, blocks] float32: the largest logit of the block
    totals: tl.tensor,  # [rows, blocks] float32: sum of exp(logit - top)
    masses: tl.tensor,  # [rows, blocks] float32: the same at the slot's temperature
    stride,
    vocab,
    blocks,
    GREEDY: tl.constexpr,
    BLOCKS: tl.constexpr,  # a program
    WIDTH: tl.constexpr,  # tokens a block
) -> None:
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + row * stride + token, token < vocab, other=-float("inf"))
    top = tl.max(tl.where(x == x, x, -float("inf")), 1)  # of what is no NaN
    # All -inf: the differences must not be NaN. One NaN or +inf makes the total NaN.
    x -= tl.where(top == -float("inf"), 0.0, top)[:, None]
    place = row * blocks + block
    tl.store(tops + place, top, block < blocks)
    tl.store(totals + place, tl.sum(tl.exp2(x * LOG2E), 1), block < blocks)
    temperature, _, _, _, _ = slot_params(table, tl.load(slots + row))
    if temperature > GREEDY:
        mass = tl.sum(tl.exp2(x * scale_of(temperature)), 1)
        tl.store(masses + place, mass, block < blocks)


@triton.jit
def _likeliest(line, top, highest, vocab, blocks, PAD: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest token of the largest logit."""
    block = tl.min(tl.where(top == highest, tl.arange(0, PAD), blocks - 1), 0)
    token = block * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(line + token, token < vocab, other=-float("inf"))
    return tl.min(tl.where((x == highest) & (token < vocab), token, vocab - 1), 0)


@triton.jit
def _any(line, mass, target, highest, scale, vocab, PAD: tl.constexpr, WIDTH: tl.constexpr):
    """A token of the whole vocabulary."""
    block, rest = find(mass, target, PAD)
    token = block * WIDTH + tl.arange(0, WIDTH)
    _, weight = load_tile(line, token, vocab, highest, scale)
    column, _ = find(weight.to(tl.float64), rest, WIDTH)
    return block * WIDTH + column


@triton.jit
def _pick(picks, top, blocks, PAD: tl.constexpr, PICKS: tl.constexpr):
    """The blocks with the largest logits, in order of ids; returns the largest key of the others.

    The n largest logits lie in the n blocks whose largest logits are largest.
    """
    block = tl.arange(0, PAD)
    key = tl.where(block < blocks, key_of(top), NOTHING)
    count = tl.minimum(blocks, PICKS)
    low, high = tl.min(tl.where(block < blocks, key, 0x7FFFFFFF), 0), tl.max(key, 0)
    one = tl.full([PAD], 1.0, tl.float32)
    threshold = threshold_in(key, one, count, low.to(tl.int64), high.to(tl.int64) + 1)
    equal = key == threshold
    spare = count - count_of(key > threshold)
    chosen = (key > threshold) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    tl.store(picks + tl.cumsum(chosen.to(tl.int32), 0) - 1, block, chosen)
    place = tl.arange(0, PICKS)
    tl.store(picks + place, tl.zeros_like(place) + blocks, place >= count)
    tl.debug_barrier()
    return tl.max(tl.where(chosen, NOTHING, key), 0)


@triton.jit
def _few(
    picks,
    line,
    top,
    total,
    u,
    highest,
    scale,
    top_k,
    top_p,
    min_p,
    vocab,
    blocks,
    PAD: tl.constexpr,
    PICKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A token of the allowed ones, or -1 where not all of those are in the picked blocks."""
    TILE: tl.constexpr = PICKS * WIDTH
    outside = _pick(picks, top, blocks, PAD, PICKS)
    at = tl.arange(0, TILE)
    token = tl.load(picks + at // WIDTH) * WIDTH + at % WIDTH
    key, weight = load_tile(line, token, vocab, highest, scale)
    one = tl.full([TILE], 1.0, tl.float32)
    above_all = key_of(highest).to(tl.int64) + 1
    # Where all that stay are in the picked blocks, none of them is less than all other blocks.
    threshold = tl.maximum(outside, LEAST)
    spare = tl.full([], EVERY_TOKEN, tl.int32)
    is_all = outside == NOTHING
    is_few = is_all | (weight_at(outside, highest, scale) < min_p)
    if top_k > 0:
        is_few = is_all | (top_k <= PICKS) | (count_of(key > outside) >= top_k)
        if is_few:
            threshold = threshold_in(key, one, top_k, threshold.to(tl.int64), above_all)
            spare = top_k - count_of(key > threshold)
            unit = weight_at(threshold, highest, scale).to(tl.float64)
            total = mass_of(weight, key > threshold) + spare * unit
    if top_p < 1.0:
        goal = top_p * total
        if top_k == 0:
            is_few = is_all | (mass_of(weight, key > outside) >= goal)
        if is_few:
            found = threshold_in(key, weight, goal, threshold.to(tl.int64), above_all)
            unit = weight_at(found, highest, scale).to(tl.float64)
            above = mass_of(weight, key > found)
            wanted = equals_wanted(goal, above, unit, count_of(key == found))
            spare = tl.where(found == threshold, tl.minimum(spare, wanted), wanted)
            threshold = found
    chosen = tl.full([], -1, tl.int32)
    if is_few:
        last = tl.full([], EVERY_TOKEN, tl.int32)
        equal = key == threshold
        if spare < count_of(equal):
            last = last_equal(token, equal, spare, vocab)
        left = kept(key, weight, token, threshold, last, min_p)
        place = find_in_tile(left, u * tl.sum(left, 0).to(tl.float64), WIDTH, TILE)
        chosen = tl.load(picks + place // WIDTH) * WIDTH + place % WIDTH
    return chosen


@triton.jit
def _wide_kind(
    state, line, total, top_k, top_p, highest, scale, vocab, blocks,
    MOST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kind = tl.full([], WIDE_WHOLE, tl.int32)
    if top_k > MOST:
        kind = tl.full([], WIDE_SEARCHED, tl.int32)
    else:
        if (top_k > 0) | (top_p < 1.0):
            kind = tl.full([], WIDE_SCANNED, tl.int32)
            upper, lower = sampled_keys(
                line, total, top_k, top_p, highest, scale, vocab, blocks, MOST, WIDTH, TILE
            )
            tl.store(state, upper)
            tl.store(state + 1, lower)
    return kind


@triton.jit
def row_kernel(
    logits: tl.tensor,  # [rows, vocab] float32, a row every stride numbers
    slots: tl.tensor,  # [rows] int64
    index: tl.tensor,  # [rows] int64
    table: tl.tensor,  # [slots + 1, WORDS] int64
    last_token: tl.tensor,  # [slots + 1] int64
    tops: tl.tensor,  # [rows, blocks], as above
    totals: tl.tensor,
    masses: tl.tensor,
    picks: tl.tensor,  # [rows, PICKS] int32, scratch
    wide: tl.tensor,  # [rows] int32: how the row is still to be drawn; 0: it is drawn
    state: tl.tensor,  # [rows, STATE] int32
    arrived: tl.tensor,  # [rows] int32, made zeros
    tokens: tl.tensor,  # [rows] int64
    logprobs: tl.tensor,  # [rows] float32
    failed: tl.tensor,  # [rows] bool
    stride,
    vocab,
    blocks,
    GREEDY: tl.constexpr,
    PAD: tl.constexpr,
    PICKS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,  # top_k that a scan has room for
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature, top_k, top_p, min_p, seed = slot_params(table, slot)
    line = logits + row * stride
    top, highest, whole = row_summary(tops, totals, row, blocks, PAD)
    token = tl.full([], -1, tl.int32)
    kind = tl.full([], 0, tl.int32)
    is_finite = ((whole - whole) == 0.0) & (highest > -float("inf"))
    if (temperature > GREEDY) & is_finite:
        u = uniform(seed, tl.load(index + row))
        scale = scale_of(temperature)
        block = tl.arange(0, PAD)
        mass = tl.load(masses + row * blocks + block, block < blocks, other=0.0)
        mass = (mass * tl.exp2((top - highest) * scale)).to(tl.float64)
        total = tl.sum(mass, 0)
        if (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0):
            token = _any(line, mass, u * total, highest, scale, vocab, PAD, WIDTH)
        else:
            token = _few(
                picks + row * PICKS, line, top, total, u, highest, scale, top_k, top_p, min_p,
                vocab, blocks, PAD, PICKS, WIDTH,
            )  # fmt: skip
            if token < 0:
                kind = _wide_kind(
                    state + row * STATE, line, total, top_k, top_p, highest, scale, vocab, blocks,
                    MOST, WIDTH, PICKS * WIDTH,
                )  # fmt: skip
    else:
        token = _likeliest(line, top, highest, vocab, blocks, PAD, WIDTH)
    tl.store(wide + row, kind)
    tl.store(arrived + row, 0)
    if token >= 0:
        logprob = tl.load(line + token) - highest - tl.log(whole)
        finish(tokens, logprobs, failed, last_token, row, slot, token, logprob)
