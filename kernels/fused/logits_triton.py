# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Log-probabilities of chosen tokens in Triton, without the logits of all others in memory.

Logits are float32 sums. A program makes a tile of them, keeps three numbers a row, and forgets it.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["rows", "tiles"])
def tile_kernel(
    hidden: tl.tensor_descriptor,  # [rows, width], blocks of [ROWS, DEPTH]
    weight: tl.tensor_descriptor,  # [vocab, width], blocks of [TOKENS, DEPTH]
    tops: tl.tensor,  # [rows, tiles] float32: the largest logit of the tile
    totals: tl.tensor,  # [rows, tiles] float32: sum of exp(logit - top)
    ids: tl.tensor,  # [rows, tiles] int32: the token of `top`, the lowest on a tie
    rows: tl.tensor,
    vocab: tl.tensor,
    width: tl.tensor,
    tiles: tl.tensor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    # Programs that run together share the tokens' weights: each is read from memory once.
    row_tiles = tl.cdiv(rows, ROWS)
    # One loop over tiles and depth: the loads of the next tile run under this one's exponentials.
    for work in tl.range(tl.program_id(0), row_tiles * tiles, tl.num_programs(0), flatten=True):
        tile = work // row_tiles
        first_row = (work % row_tiles) * ROWS
        logits = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, width, DEPTH):
            a = hidden.load([first_row, start])  # zeros beyond the end
            b = weight.load([tile * TOKENS, start])
            if WIDEN:  # the interpreter's bf16 product is wrong; fp32 must not be rounded to tf32
                left, right = a.to(tl.float32), b.to(tl.float32)
                logits = tl.dot(left, right.T, logits, input_precision="ieee")
            else:
                logits = tl.dot(a, b.T, logits)
        row = first_row + tl.arange(0, ROWS)
        token = tile * TOKENS + tl.arange(0, TOKENS)
        logits = tl.where((token < vocab)[None, :], logits, -float("inf"))
        top, best = tl.max(logits, 1, return_indices=True)
        # All -inf: the differences must not be NaN. One NaN or +inf makes the total NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp2((logits - base[:, None]) * LOG2E), 1)
        place = row.to(tl.int64) * tiles + tile
        tl.store(tops + place, top, row < rows)
        tl.store(totals + place, total, row < rows)
        tl.store(ids + place, best + tile * TOKENS, row < rows)


@triton.jit
def merge_tiles_kernel(
    tops: tl.tensor,  # [rows, tiles], as above
    totals: tl.tensor,
    ids: tl.tensor,
    lse: tl.tensor,  # [rows] float32, natural log; not finite where a logit is NaN or +inf
    argmax: tl.tensor,  # [rows] int64
    likeliest: tl.tensor,  # [rows] float32: the log-probability of argmax
    tiles: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    place = row.to(tl.int64) * tiles + tile
    top = tl.load(tops + place, tile < tiles, other=-float("inf"))
    total = tl.load(totals + place, tile < tiles, other=0.0)
    highest, best = tl.max(top, 0, return_indices=True)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    whole = tl.sum(total * tl.exp2((top - base) * LOG2E), 0)
    tl.store(lse + row, highest + tl.log2(whole) * LN2)
    tl.store(likeliest + row, -tl.log2(whole) * LN2)
    tl.store(argmax + row, tl.load(ids + row.to(tl.int64) * tiles + best).to(tl.int64))


# Parts of one uploaded array, which start anywhere: no second compilation for that.
@triton.jit(do_not_specialize_on_alignment=["rows", "tokens"])
def chosen_kernel(
    hidden: tl.tensor,  # [rows, width], a row every stride elements
    weight: tl.tensor,  # [vocab, width] contiguous
    lse: tl.tensor,  # [rows]
    rows: tl.tensor,  # [chosen]
    tokens: tl.tensor,  # [chosen]
    logprobs: tl.tensor,  # [chosen] float32
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    chosen = tl.program_id(0)
    row = tl.load(rows + chosen).to(tl.int64)
    left = hidden + row * stride
    right = weight + tl.load(tokens + chosen).to(tl.int64) * width
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(left + at, at < width, other=0.0).to(tl.float32)
        products += a * tl.load(right + at, at < width, other=0.0).to(tl.float32)
    logprob = tl.sum(products, 0) - tl.load(lse + row)
    # Two sums of the same products differ by rounding. A NaN stays.
    tl.store(logprobs + chosen, tl.where(logprob > 0.0, 0.0, logprob))
