# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Draws from rows whose allowed tokens are many, by scans of the whole row.

A scan measures (counts, or weighs) the tokens from two keys on, and keeps the candidates between
them. The keys of the first scan come from a sample of the row, so that one is mostly enough.
"""

import triton
import triton.language as tl

from stemserve.kernels.sampling.tile_triton import (
    EVERY_TOKEN,
    LEAST,
    NOTHING,
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

# Of what a sample says about the share of tokens above a threshold.
RELATIVE_DOUBT, ABSOLUTE_DOUBT = tl.constexpr(0.15), tl.constexpr(0.002)


@triton.jit
def _sampled_keys(
    line, share, by_count, least, highest, scale, vocab, blocks,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Two keys; those from the first on should measure less than the share of all, of the second
    more."""
    at = tl.arange(0, TILE)
    block = ((at // WIDTH).to(tl.int64) * blocks) // (TILE // WIDTH)
    token = block.to(tl.int32) * WIDTH + at % WIDTH
    key, weight = load_tile(line, token, vocab, highest, scale)
    measure = tl.where(by_count, 1.0, weight)
    everything = mass_of(measure, key > NOTHING)
    doubt = RELATIVE_DOUBT * tl.minimum(share, 1.0 - share) + ABSOLUTE_DOUBT
    end = key_of(highest).to(tl.int64) + 1
    low = least.to(tl.int64)
    upper, lower = end, low
    if share > doubt:
        upper = threshold_in(key, measure, (share - doubt) * everything, low, end).to(tl.int64)
    if share + doubt < 1.0:
        lower = threshold_in(key, measure, (share + doubt) * everything, low, end).to(tl.int64)
    return tl.maximum(upper, lower + 1), lower


@triton.jit
def _scan(
    line, upper, lower, highest, scale, vocab, blocks, keys, ids,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts and masses of the tokens from `upper` on, and of those between the keys.

    The latter become candidates, in order of ids, as many as there is room for.
    """
    count, between = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass, mass_between = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    upper, lower = upper.to(tl.int32), lower.to(tl.int32)
    for first in range(0, blocks * WIDTH, TILE):
        token = first + tl.arange(0, TILE)
        key, weight = load_tile(line, token, vocab, highest, scale)
        above = key >= upper
        inside = (key >= lower) & (key < upper)
        count += count_of(above)
        mass += mass_of(weight, above)
        mass_between += mass_of(weight, inside)
        rank = between + tl.cumsum(inside.to(tl.int32), 0) - 1
        room = inside & (rank < TILE)
        tl.store(keys + rank, key, room)
        tl.store(ids + rank, token, room)
        between += count_of(inside)
    tl.debug_barrier()
    return count, mass, between, mass_between


@triton.jit
def _bracket(
    line, goal, share, by_count, least, highest, scale, vocab, blocks, keys, ids,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys around the threshold of `goal` with room for all candidates between them, or adjacent.

    Returns them, the count and the mass from the upper one on, and the count between them.
    """
    low, high = least.to(tl.int64), key_of(highest).to(tl.int64) + 1
    low_count, high_count = vocab + 1, tl.full([], 0, tl.int32)
    upper, lower = _sampled_keys(
        line, share, by_count, least, highest, scale, vocab, blocks, WIDTH, TILE
    )
    count, between = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    searching = tl.full([], True, tl.int1)
    while searching:
        count, mass, between, mass_between = _scan(
            line, upper, lower, highest, scale, vocab, blocks, keys, ids, WIDTH, TILE
        )
        measured = tl.where(by_count, count.to(tl.float64), mass)
        measured_between = tl.where(by_count, between.to(tl.float64), mass_between)
        if measured >= goal:
            low, low_count = upper, count
        else:
            if (measured + measured_between >= goal) | (lower <= low):
                low, low_count = lower, count + between
                high, high_count = upper, count
                searching = (between > TILE) & (upper - lower > 1)
            else:
                high, high_count = lower, count + between
        if searching:
            third = tl.maximum((high - low) // 3, 1)
            is_small = (low_count - high_count <= TILE) | (high - low <= 1)
            upper = tl.where(is_small, high, high - third)
            lower = tl.where(is_small, low, tl.minimum(low + third, upper - 1))
    return lower, upper, count, mass, between


@triton.jit
def _last_in_row(line, threshold, spare, highest, scale, vocab, blocks, WIDTH, TILE: tl.constexpr):
    """As last_equal, in the whole row."""
    last, seen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, blocks * WIDTH, TILE):
        token = first + tl.arange(0, TILE)
        key, _ = load_tile(line, token, vocab, highest, scale)
        equal = key == threshold
        rank = seen + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= spare), token, 0), 0))
        seen += count_of(equal)
    return last


@triton.jit
def _limits(
    line, total, top_k, top_p, highest, scale, vocab, blocks, keys, ids,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The key above which tokens stay, and the last token that stays of those that have it."""
    threshold, spare = tl.full([], LEAST, tl.int32), tl.full([], EVERY_TOKEN, tl.int32)
    last = tl.full([], EVERY_TOKEN, tl.int32)
    at, whole = tl.arange(0, TILE), total
    for stage in range(2):
        by_count = stage == 0
        if (by_count & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)):
            goal = tl.where(by_count, tl.minimum(top_k, vocab).to(tl.float64), top_p * total)
            share = goal / tl.where(by_count, vocab.to(tl.float64), whole)
            lower, upper, count, mass, between = _bracket(
                line, goal, share, by_count, threshold, highest, scale, vocab, blocks, keys, ids,
                WIDTH, TILE,
            )  # fmt: skip
            found = lower.to(tl.int32)
            equal = between
            is_listed = between <= TILE
            key = tl.load(keys + at, is_listed & (at < between), other=NOTHING)
            if is_listed:
                weight = tl.where(at < between, weight_at(key, highest, scale), 0.0)
                base = tl.where(by_count, count.to(tl.float64), mass)
                measure = tl.where(by_count, 1.0, weight)
                found = threshold_in(key, measure, goal - base, lower, upper)
                mass += mass_of(weight, key > found)
                count += count_of(key > found)
                equal = count_of(key == found)
            unit = weight_at(found, highest, scale).to(tl.float64)
            above = tl.where(by_count, count.to(tl.float64), mass)
            wanted = equals_wanted(goal, above, tl.where(by_count, 1.0, unit), equal)
            spare = tl.where(found == threshold, tl.minimum(spare, wanted), wanted)
            threshold = found
            total = mass + spare * unit
            last = tl.full([], EVERY_TOKEN, tl.int32)
            if spare < equal:
                if is_listed:
                    token = tl.load(ids + at, at < between, other=0)
                    last = last_equal(token, key == threshold, spare, vocab)
                else:
                    last = _last_in_row(
                        line, threshold, spare, highest, scale, vocab, blocks, WIDTH, TILE
                    )
    return threshold, last


@triton.jit
def wide_kernel(
    logits: tl.tensor,  # [rows, vocab] float32, a row every stride numbers
    slots: tl.tensor,  # [rows] int64
    index: tl.tensor,  # [rows] int64
    table: tl.tensor,  # [slots + 1, WORDS] int64
    last_token: tl.tensor,  # [slots + 1] int64
    tops: tl.tensor,  # [rows, blocks], of block_kernel
    totals: tl.tensor,
    masses: tl.tensor,
    is_wide: tl.tensor,  # [rows] int8: to be drawn
    keys: tl.tensor,  # [rows, TILE] int32, scratch
    ids: tl.tensor,  # [rows, TILE] int32, scratch
    sums: tl.tensor,  # [rows, TILES] float64, scratch
    tokens: tl.tensor,  # [rows] int64
    logprobs: tl.tensor,  # [rows] float32
    failed: tl.tensor,  # [rows] bool
    stride,
    vocab,
    blocks,
    PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # that hold a row
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_wide + row) != 0:
        slot = tl.load(slots + row)
        temperature, top_k, top_p, min_p, seed = slot_params(table, slot)
        line = logits + row * stride
        scale = scale_of(temperature)
        top, highest, whole = row_summary(tops, totals, row, blocks, PAD)
        block = tl.arange(0, PAD)
        mass = tl.load(masses + row * blocks + block, block < blocks, other=0.0)
        total = tl.sum((mass * tl.exp2((top - highest) * scale)).to(tl.float64), 0)
        threshold, last = _limits(
            line, total, top_k, top_p, highest, scale, vocab, blocks,
            keys + row * TILE, ids + row * TILE, WIDTH, TILE,
        )  # fmt: skip
        place = sums + row * TILES
        at = tl.arange(0, TILE)
        for tile in range(TILES):
            token = tile * TILE + at
            key, weight = load_tile(line, token, vocab, highest, scale)
            left = kept(key, weight, token, threshold, last, min_p)
            tl.store(place + tile, tl.sum(left, 0).to(tl.float64))
        tl.debug_barrier()
        of_tiles = tl.load(place + tl.arange(0, TILES))
        u = uniform(seed, tl.load(index + row))
        tile, rest = find(of_tiles, u * tl.sum(of_tiles, 0), TILES)
        token = tile * TILE + at
        key, weight = load_tile(line, token, vocab, highest, scale)
        left = kept(key, weight, token, threshold, last, min_p)
        chosen = tile * TILE + find_in_tile(left, rest, WIDTH, TILE)
        logprob = tl.load(line + chosen) - highest - tl.log(whole)
        finish(tokens, logprobs, failed, last_token, row, slot, chosen, logprob)
