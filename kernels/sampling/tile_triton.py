# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""What the sampling kernels share: a slot's parameters, a row's summary, searches within a tile.

A tile is TILE logits of one row in the registers of one program: `key` orders them as integers, and
`weight` is relative to the row's most likely token, which has 1.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-(1 << 31))  # a key below that of -inf
LEAST = tl.constexpr(-2139095041)  # the key of -inf
EVERY_TOKEN = tl.constexpr(1 << 30)
WORDS = tl.constexpr(4)
# How a row with many allowed tokens is drawn; 0: there are few.
WIDE_SCANNED = tl.constexpr(1)  # keys for a scan are known
WIDE_SEARCHED = tl.constexpr(2)  # by one program
WIDE_WHOLE = tl.constexpr(3)  # neither top_k nor top_p
STATE = tl.constexpr(4)  # numbers a row: upper key, lower key; then threshold, last token


@triton.jit
def slot_params(table: tl.tensor, slot: tl.tensor):
    """Temperature, top_k, top_p, min_p and seed; see SLOT."""
    place = table + slot * WORDS
    first = tl.load(place)
    temperature = (first & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = (first >> 32).to(tl.int32)
    top_p = tl.load(place + 1).to(tl.float64, bitcast=True)
    min_p = (tl.load(place + 2) & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return temperature, top_k, top_p, min_p, tl.load(place + 3)


@triton.jit
def uniform(seed: tl.tensor, index: tl.tensor):
    """48 bits of Philox 4x32-10 in [0, 1): the key is the seed, the counter the index."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(low)
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (first.to(tl.int64) << 16) | (second.to(tl.int64) >> 16)
    return bits.to(tl.float64) * (1.0 / (1 << 48))


@triton.jit
def scale_of(temperature: tl.tensor):
    """Of logits in exp2."""
    return (1.0 / temperature.to(tl.float64) * LOG2E).to(tl.float32)


@triton.jit
def row_summary(tops: tl.tensor, totals: tl.tensor, row: tl.tensor, blocks, PAD: tl.constexpr):
    """The blocks' largest logits, the row's, and the sum of exp of the distances to the latter."""
    block = tl.arange(0, PAD)
    place = row * blocks + block
    top = tl.load(tops + place, block < blocks, other=-float("inf"))
    total = tl.load(totals + place, block < blocks, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    return top, highest, tl.sum(total * tl.exp2((top - base) * LOG2E), 0)


@triton.jit
def key_of(x: tl.tensor):
    """Integers in the order of the numbers; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key: tl.tensor):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_at(key: tl.tensor, highest: tl.tensor, scale: tl.tensor):
    return tl.exp2((number_of(key) - highest) * scale)


@triton.jit
def load_tile(line: tl.tensor, token: tl.tensor, vocab, highest: tl.tensor, scale: tl.tensor):
    """Keys and weights of some tokens; those from vocab on are NOTHING."""
    inside = token < vocab
    x = tl.load(line + token, inside, other=-float("inf"))
    return tl.where(inside, key_of(x), NOTHING), tl.exp2((x - highest) * scale)


@triton.jit
def find(weights: tl.tensor, target: tl.tensor, COUNT: tl.constexpr):
    """The first place whose cumulated weight is above the target, and what is left of that."""
    at = tl.arange(0, COUNT)
    cumulated = tl.cumsum(weights, 0)
    found = tl.min(tl.where((cumulated > target) & (weights > 0), at, COUNT), 0)
    # Rounding may leave the target above the whole sum.
    place = tl.minimum(found, tl.max(tl.where(weights > 0, at, 0), 0))
    return place, target - tl.sum(tl.where(at < place, weights, 0.0), 0)


@triton.jit
def find_in_tile(weights: tl.tensor, target: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """As find, for a tile of float32."""
    LINES: tl.constexpr = TILE // WIDTH
    lines = tl.reshape(weights, [LINES, WIDTH])
    line, rest = find(tl.sum(lines, 1).to(tl.float64), target, LINES)
    chosen = tl.where(tl.arange(0, LINES)[:, None] == line, lines, 0.0)
    column, _ = find(tl.sum(chosen, 0).to(tl.float64), rest, WIDTH)
    return line * WIDTH + column


@triton.jit
def count_of(mask: tl.tensor):
    return tl.sum(mask.to(tl.int32), 0)


@triton.jit
def mass_of(weight: tl.tensor, mask: tl.tensor):
    return tl.sum(tl.where(mask, weight, 0.0), 0).to(tl.float64)


@triton.jit
def threshold_in(key: tl.tensor, measure: tl.tensor, goal: tl.tensor, low: tl.tensor, high):
    """The largest key such that those from it on measure at least the goal: low <= it < high."""
    while high - low > 1:
        middle = (low + high) >> 1
        if mass_of(measure, key >= middle.to(tl.int32)) >= goal:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def last_equal(token: tl.tensor, equal: tl.tensor, spare: tl.tensor, vocab):
    """The token at which `spare` equal ones are reached, in the order of ids."""
    low = tl.full([], -1, tl.int32)
    high = low + vocab
    while high - low > 1:
        middle = (low + high) >> 1
        if count_of(equal & (token <= middle)) >= spare:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def equals_wanted(goal: tl.tensor, above: tl.tensor, unit: tl.tensor, equal: tl.tensor):
    """How many of the equal tokens at a threshold are needed to reach the goal."""
    wanted = tl.ceil((goal - above) / tl.maximum(unit, 1e-300))
    return tl.minimum(tl.maximum(wanted, 1.0), equal.to(tl.float64)).to(tl.int32)


@triton.jit
def kept(key, weight, token, threshold, last, min_p):
    """The weights of the tokens that stay, and 0."""
    stays = (key > threshold) | ((key == threshold) & (token <= last))
    return tl.where(stays & (weight >= min_p), weight, 0.0)


@triton.jit
def finish(tokens, logprobs, failed, last_token, row, slot, token, logprob) -> None:
    """A NaN or an infinite log-probability is a failure."""
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(last_token + slot, token.to(tl.int64))
    tl.store(logprobs + row, logprob)
    is_finite = (logprob - logprob) == 0.0
    tl.store(failed + row, (is_finite == 0).to(tl.int8))
