# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Draws from rows whose allowed tokens are many: the whole row is scanned and then weighed, a
program a tile."""

import triton
import triton.language as tl

from stemserve.kernels.sampling.search_triton import limits_of_row, scan_tile, spared, within
from stemserve.kernels.sampling.tile_triton import (
    EVERY_TOKEN,
    LEAST,
    NOTHING,
    STATE,
    WIDE_SCANNED,
    WIDE_SEARCHED,
    WIDE_WHOLE,
    find,
    find_in_tile,
    finish,
    kept,
    last_equal,
    load_tile,
    row_summary,
    scale_of,
    slot_params,
    uniform,
)


@triton.jit
def _is_last(arrived, programs) -> tl.tensor:
    """Whether all other programs of the row have come here; the count starts anew then."""
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1)
    if before == programs - 1:
        tl.store(arrived, 0)
    return before == programs - 1


@triton.jit
def _candidate_places(starts, between, TILES: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Where the candidates of the tiles lie, of which there are `between` [TILES]."""
    tile = tl.arange(0, TILES)
    tl.store(starts + tile, tl.cumsum(between, 0) - between)
    tl.debug_barrier()
    at = tl.arange(0, TILE)
    found = tl.zeros([TILE], tl.int32)
    for level in tl.static_range(1, 16):
        if (TILES >> level) > 0:
            probed = found + (TILES >> level)
            found = tl.where(tl.load(starts + probed) <= at, probed, found)
    return found * ROOM + at - tl.load(starts + found)


@triton.jit
def _limits(
    partial, starts, keys, ids, upper, lower, total, top_k, top_p, highest, scale, vocab,
    tiles, TILES: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As limits_of_row, from a scan; and whether the scan told."""
    tile = tl.arange(0, TILES)
    ran = tile < tiles
    count = tl.sum(tl.load(partial + tile, ran, other=0.0), 0).to(tl.int32)
    mass = tl.sum(tl.load(partial + TILES + tile, ran, other=0.0), 0)
    of_tiles = tl.load(partial + 2 * TILES + tile, ran, other=0.0).to(tl.int32)
    mass_between = tl.sum(tl.load(partial + 3 * TILES + tile, ran, other=0.0), 0)
    between = tl.sum(of_tiles, 0)
    by_count = top_k > 0
    goal = tl.where(by_count, tl.minimum(top_k, vocab).to(tl.float64), top_p * total)
    measured = tl.where(by_count, count.to(tl.float64), mass)
    measured_between = tl.where(by_count, between.to(tl.float64), mass_between)
    told = (measured < goal) & (measured + measured_between >= goal)
    told = told & (between <= TILE) & (tl.max(of_tiles, 0) <= ROOM)
    threshold, last = tl.full([], LEAST, tl.int32), tl.full([], EVERY_TOKEN, tl.int32)
    if told:
        inside = tl.arange(0, TILE) < between
        place = _candidate_places(starts, of_tiles, TILES, ROOM, TILE)
        key = tl.load(keys + place, inside, other=NOTHING)
        spare, equal = tl.full([], EVERY_TOKEN, tl.int32), tl.full([], 0, tl.int32)
        for stage in range(2):
            by_count = stage == 0
            if (by_count & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)):
                goal = tl.where(by_count, tl.minimum(top_k, vocab).to(tl.float64), top_p * total)
                low, high = tl.maximum(lower, threshold).to(tl.int64), upper.to(tl.int64)
                found, above, mass_above, equal = within(
                    key, low, high, count, mass, goal, by_count, highest, scale
                )
                spare, total = spared(
                    found, above, mass_above, equal, goal, by_count, threshold, spare, highest,
                    scale,
                )  # fmt: skip
                threshold = found
        if spare < equal:
            token = tl.load(ids + place, inside, other=0)
            last = last_equal(token, key == threshold, spare, vocab)
    return threshold, last, told


@triton.jit
def scan_kernel(
    logits: tl.tensor,  # [rows, vocab] float32, a row every stride numbers
    slots: tl.tensor,  # [rows] int64
    table: tl.tensor,  # [slots + 1, WORDS] int64
    tops: tl.tensor,  # [rows, blocks], of block_kernel
    wide: tl.tensor,  # [rows] int32: how the row is drawn
    state: tl.tensor,  # [rows, STATE] int32
    partial: tl.tensor,  # [rows, 4, TILES] float64, out
    keys: tl.tensor,  # [rows, TILES, ROOM] int32, out
    ids: tl.tensor,
    stride,
    vocab,
    blocks,
    PAD: tl.constexpr,
    SCAN: tl.constexpr,
    TILES: tl.constexpr,  # of SCAN tokens, that hold a row
    ROOM: tl.constexpr,
) -> None:
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(wide + row) == WIDE_SCANNED:
        temperature, _, _, _, _ = slot_params(table, tl.load(slots + row))
        block = tl.arange(0, PAD)
        top = tl.load(tops + row * blocks + block, block < blocks, other=-float("inf"))
        upper, lower = tl.load(state + row * STATE), tl.load(state + row * STATE + 1)
        room = row * (TILES * ROOM) + tile * ROOM
        count, mass, between, mass_between = scan_tile(
            logits + row * stride, tile * SCAN, upper, lower, tl.max(top, 0),
            scale_of(temperature), vocab, keys + room, ids + room, 0, ROOM, SCAN,
        )  # fmt: skip
        place = partial + row * (4 * TILES) + tile
        tl.store(place, count.to(tl.float64))
        tl.store(place + TILES, mass)
        tl.store(place + 2 * TILES, between.to(tl.float64))
        tl.store(place + 3 * TILES, mass_between)


@triton.jit
def settle_kernel(
    logits: tl.tensor,  # [rows, vocab] float32, a row every stride numbers
    slots: tl.tensor,  # [rows] int64
    table: tl.tensor,  # [slots + 1, WORDS] int64
    tops: tl.tensor,  # [rows, blocks], of block_kernel
    totals: tl.tensor,
    masses: tl.tensor,
    wide: tl.tensor,  # [rows] int32: how the row is drawn
    state: tl.tensor,  # [rows, STATE] int32
    partial: tl.tensor,  # [rows, 4, TILES] float64, of scan_kernel
    keys: tl.tensor,  # [rows, TILES, ROOM] int32, of scan_kernel; then scratch
    ids: tl.tensor,
    starts: tl.tensor,  # [rows, TILES] int32, scratch
    stride,
    vocab,
    blocks,
    tiles,
    PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(wide + row)
    if (kind == WIDE_SCANNED) | (kind == WIDE_SEARCHED):
        temperature, top_k, top_p, _, _ = slot_params(table, tl.load(slots + row))
        line = logits + row * stride
        scale = scale_of(temperature)
        top, highest, _ = row_summary(tops, totals, row, blocks, PAD)
        keys += row * (TILES * ROOM)
        ids += row * (TILES * ROOM)
        state += row * STATE
        block = tl.arange(0, PAD)
        mass = tl.load(masses + row * blocks + block, block < blocks, other=0.0)
        total = tl.sum((mass * tl.exp2((top - highest) * scale)).to(tl.float64), 0)
        threshold, last = tl.full([], LEAST, tl.int32), tl.full([], EVERY_TOKEN, tl.int32)
        told = kind == WIDE_SCANNED
        if told:
            threshold, last, told = _limits(
                partial + row * (4 * TILES), starts + row * TILES, keys, ids, tl.load(state),
                tl.load(state + 1), total, top_k, top_p, highest, scale, vocab, tiles,
                TILES, ROOM, TILE,
            )  # fmt: skip
        if told == 0:
            threshold, last = limits_of_row(
                line, total, top_k, top_p, highest, scale, vocab, blocks, keys, ids, WIDTH, TILE
            )
        tl.store(state + 2, threshold)
        tl.store(state + 3, last)


@triton.jit
def weigh_kernel(
    logits: tl.tensor,  # [rows, vocab] float32, a row every stride numbers
    slots: tl.tensor,  # [rows] int64
    index: tl.tensor,  # [rows] int64
    table: tl.tensor,  # [slots + 1, WORDS] int64
    last_token: tl.tensor,  # [slots + 1] int64
    tops: tl.tensor,  # [rows, blocks], of block_kernel
    totals: tl.tensor,
    wide: tl.tensor,  # [rows] int32: how the row is drawn
    state: tl.tensor,  # [rows, STATE] int32
    arrived: tl.tensor,  # [rows] int32 zeros
    sums: tl.tensor,  # [rows, TILES] float64, scratch
    tokens: tl.tensor,  # [rows] int64
    logprobs: tl.tensor,  # [rows] float32
    failed: tl.tensor,  # [rows] bool
    stride,
    vocab,
    blocks,
    PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SCAN: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind = tl.load(wide + row)
    if kind != 0:
        slot = tl.load(slots + row)
        temperature, _, _, min_p, seed = slot_params(table, slot)
        line = logits + row * stride
        scale = scale_of(temperature)
        _, highest, whole = row_summary(tops, totals, row, blocks, PAD)
        threshold, last = tl.full([], LEAST, tl.int32), tl.full([], EVERY_TOKEN, tl.int32)
        if kind != WIDE_WHOLE:
            threshold = tl.load(state + row * STATE + 2)
            last = tl.load(state + row * STATE + 3)
        token = tile * SCAN + tl.arange(0, SCAN)
        key, weight = load_tile(line, token, vocab, highest, scale)
        left = kept(key, weight, token, threshold, last, min_p)
        tl.store(sums + row * TILES + tile, tl.sum(left, 0).to(tl.float64))
        if _is_last(arrived + row, tl.num_programs(0)):
            at = tl.arange(0, TILES)
            of_tiles = tl.load(sums + row * TILES + at, at < tl.num_programs(0), other=0.0)
            u = uniform(seed, tl.load(index + row))
            chosen, rest = find(of_tiles, u * tl.sum(of_tiles, 0), TILES)
            token = chosen * SCAN + tl.arange(0, SCAN)
            key, weight = load_tile(line, token, vocab, highest, scale)
            left = kept(key, weight, token, threshold, last, min_p)
            chosen = chosen * SCAN + find_in_tile(left, rest, WIDTH, SCAN)
            logprob = tl.load(line + chosen) - highest - tl.log(whole)
            finish(tokens, logprobs, failed, last_token, row, slot, chosen, logprob)
