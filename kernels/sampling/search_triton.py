# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Where a row's allowed tokens end, when they are many: searches over the whole row.

A scan measures (counts, or weighs) the tokens from one key on, and those between it and a lower
one, which become candidates. A search within the candidates then is exact.
"""

import triton
import triton.language as tl

from stemserve.kernels.sampling.tile_triton import (
    EVERY_TOKEN,
    LEAST,
    NOTHING,
    count_of,
    equals_wanted,
    key_of,
    last_equal,
    load_tile,
    mass_of,
    threshold_in,
    weight_at,
)

# Of the mass of a sampled tail, in standard errors and as a share of the row's; and of a count, how
# many times as many tokens are taken, and how many more of the sample.
ERRORS, MOST_DOUBT = tl.constexpr(5.0), tl.constexpr(0.022)
COUNT_DOUBT, SPARE_COUNT = tl.constexpr(1.3), tl.constexpr(30.0)


@triton.jit
def sampled_keys(
    line, total, top_k, top_p, highest, scale, vocab, blocks,
    MOST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Two keys between which the threshold should be: of top_k, without it of top_p.

    Where at most some MOST tokens stay, the first key is above all, so that they are between the
    keys. Otherwise the keys are found by what top_p cuts off: many tokens of little weight.
    """
    at = tl.arange(0, TILE)
    block = ((at // WIDTH).to(tl.int64) * blocks) // (TILE // WIDTH)
    token = block.to(tl.int32) * WIDTH + at % WIDTH
    key, weight = load_tile(line, token, vocab, highest, scale)
    one = tl.full([TILE], 1.0, tl.float32)
    everything, size = mass_of(weight, key > NOTHING), mass_of(one, key > NOTHING)
    share = size / vocab
    tail = (1.0 - top_p) * total * share
    upper = key_of(highest).to(tl.int64) + 1
    lower = tl.full([], LEAST, tl.int64)
    middle, most = lower, top_k
    if top_k == 0:
        middle = threshold_in(key, weight, everything - tail, lower, upper).to(tl.int64)
        few = mass_of(one, key >= middle.to(tl.int32)) < share * (MOST // 2)
        most = tl.where(few, MOST, 0)
    if most > 0:
        wanted = most * share * COUNT_DOUBT + SPARE_COUNT
        if wanted < size:
            lower = threshold_in(key, one, wanted, lower, upper).to(tl.int64)
    else:
        unit = weight_at(middle.to(tl.int32), highest, scale).to(tl.float64)
        doubt = tl.minimum(tl.sqrt(tail * unit) * ERRORS, total * share * MOST_DOUBT)
        if doubt < tail:
            wanted = everything - tail + doubt
            lower = threshold_in(key, weight, wanted, lower, middle + 1).to(tl.int64)
        if tail + doubt < everything:
            wanted = everything - tail - doubt
            upper = threshold_in(key, weight, wanted, middle, upper).to(tl.int64)
    return tl.maximum(upper, lower + 1).to(tl.int32), lower.to(tl.int32)


@triton.jit
def scan_tile(
    line, first, upper, lower, highest, scale, vocab, keys, ids, seen,
    ROOM: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Counts and masses of some tokens: those from `upper` on, and those between the keys.

    The latter become candidates, in order of ids behind those seen before, while there is room.
    """
    token = first + tl.arange(0, SCAN)
    key, weight = load_tile(line, token, vocab, highest, scale)
    above = key >= upper
    inside = (key >= lower) & (key < upper)
    rank = seen + tl.cumsum(inside.to(tl.int32), 0) - 1
    room = inside & (rank < ROOM)
    tl.store(keys + rank, key, room)
    tl.store(ids + rank, token, room)
    return count_of(above), mass_of(weight, above), count_of(inside), mass_of(weight, inside)


@triton.jit
def _scan_row(
    line, upper, lower, highest, scale, vocab, blocks, keys, ids,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As scan_tile, of all tokens."""
    count, between = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass, mass_between = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    upper, lower = upper.to(tl.int32), lower.to(tl.int32)
    for first in range(0, blocks * WIDTH, TILE):
        a, b, c, d = scan_tile(
            line, first, upper, lower, highest, scale, vocab, keys, ids, between, TILE, TILE
        )
        count, mass, between, mass_between = count + a, mass + b, between + c, mass_between + d
    tl.debug_barrier()
    return count, mass, between, mass_between


@triton.jit
def _bracket(
    line, goal, by_count, least, highest, scale, vocab, blocks, keys, ids,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys around the threshold of `goal` with room for all candidates between them, or adjacent.

    Returns them, the count and the mass from the upper one on, and the count between them.
    """
    low, high = least.to(tl.int64), key_of(highest).to(tl.int64) + 1
    low_count, high_count = vocab + 1, tl.full([], 0, tl.int32)
    upper, lower = high, low
    count, between = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    searching = tl.full([], True, tl.int1)
    while searching:
        third = tl.maximum((high - low) // 3, 1)
        is_small = (low_count - high_count <= TILE) | (high - low <= 1)
        upper = tl.where(is_small, high, high - third)
        lower = tl.where(is_small, low, tl.minimum(low + third, upper - 1))
        count, mass, between, mass_between = _scan_row(
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
    return lower, upper, count, mass, between


@triton.jit
def _last_in_row(
    line, threshold, spare, highest, scale, vocab, blocks, WIDTH: tl.constexpr, TILE: tl.constexpr
):
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
def within(key, lower, upper, count, mass, goal, by_count, highest, scale):
    """The threshold among candidates; the count and the mass above it, and how many equal it.

    `count` and `mass` are those from `upper` on, where the candidates end.
    """
    weight = tl.where(key > NOTHING, weight_at(key, highest, scale), 0.0)
    measure = tl.where(by_count, 1.0, weight)
    base = tl.where(by_count, count.to(tl.float64), mass)
    found = threshold_in(key, measure, goal - base, lower, upper)
    above = key > found
    return found, count + count_of(above), mass + mass_of(weight, above), count_of(key == found)


@triton.jit
def spared(found, count, mass, equal, goal, by_count, threshold, spare, highest, scale):
    """How many of those equal to the threshold stay, and the mass of all that stay.

    `threshold` and `spare` are those of an earlier goal.
    """
    unit = weight_at(found, highest, scale).to(tl.float64)
    above = tl.where(by_count, count.to(tl.float64), mass)
    wanted = equals_wanted(goal, above, tl.where(by_count, 1.0, unit), equal)
    spare = tl.where(found == threshold, tl.minimum(spare, wanted), wanted)
    return spare, mass + spare * unit


@triton.jit
def limits_of_row(
    line, total, top_k, top_p, highest, scale, vocab, blocks, keys, ids,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The key above which tokens stay, and the last token that stays of those that have it."""
    threshold, spare = tl.full([], LEAST, tl.int32), tl.full([], EVERY_TOKEN, tl.int32)
    last = tl.full([], EVERY_TOKEN, tl.int32)
    at = tl.arange(0, TILE)
    for stage in range(2):
        by_count = stage == 0
        if (by_count & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)):
            goal = tl.where(by_count, tl.minimum(top_k, vocab).to(tl.float64), top_p * total)
            lower, upper, count, mass, equal = _bracket(
                line, goal, by_count, threshold, highest, scale, vocab, blocks, keys, ids,
                WIDTH, TILE,
            )  # fmt: skip
            found = lower.to(tl.int32)
            is_listed = equal <= TILE
            inside = at < equal
            if is_listed:
                key = tl.load(keys + at, inside, other=NOTHING)
                found, count, mass, equal = within(
                    key, lower, upper, count, mass, goal, by_count, highest, scale
                )
            spare, total = spared(
                found, count, mass, equal, goal, by_count, threshold, spare, highest, scale
            )
            threshold = found
            last = tl.full([], EVERY_TOKEN, tl.int32)
            if spare < equal:
                if is_listed:
                    token = tl.load(ids + at, inside, other=0)
                    key = tl.load(keys + at, inside, other=NOTHING)
                    last = last_equal(token, key == threshold, spare, vocab)
                else:
                    last = _last_in_row(
                        line, threshold, spare, highest, scale, vocab, blocks, WIDTH, TILE
                    )
    return threshold, last
