# Device code: Triton gives these functions their types when it compiles them.
# type: ignore
"""Decode steps that follow each other without the host, in Triton: the rows before each, and what
was drawn after it. One program: the rows are few."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "steps", "places_at", "values_at", "tables_at"])
def advance_kernel(
    inputs: tl.tensor,  # int32; see burst.py
    last_token: tl.tensor,  # [slots] int64
    token_ids: tl.tensor,  # [rows] int64, written
    positions: tl.tensor,  # [rows] int32, written
    kv_slots: tl.tensor,  # [rows] int32, written
    sample_slots: tl.tensor,  # [rows] int64, written
    sample_index: tl.tensor,  # [rows] int64, written
    rows: tl.tensor,
    steps: tl.tensor,
    places_at: tl.tensor,
    values_at: tl.tensor,
    tables_at: tl.tensor,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entries = tl.load(inputs + 1)
    last = tl.load(inputs + 2)
    step = tl.minimum(tl.load(inputs), last)  # behind the last step it comes again
    fields = inputs + HEADER + step * rows
    field = steps * rows
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        token = tl.load(fields + row, inside, other=0)
        slot = tl.where(token < 0, -1 - token, 0)
        drawn = tl.load(last_token + slot, inside, other=0)
        tl.store(token_ids + row, tl.where(token < 0, drawn, token.to(tl.int64)), inside)
        tl.store(positions + row, tl.load(fields + field + row, inside, other=0), inside)
        tl.store(kv_slots + row, tl.load(fields + 2 * field + row, inside, other=0), inside)
        index = tl.load(fields + 3 * field + row, inside, other=0)
        tl.store(sample_index + row, index.to(tl.int64), inside)
        slot = tl.load(inputs + HEADER + 4 * field + row, inside, other=0)
        tl.store(sample_slots + row, slot.to(tl.int64), inside)
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < entries
        place = tl.load(inputs + places_at + entry, inside, other=0)
        value = tl.load(inputs + values_at + step * entries + entry, inside, other=0)
        tl.store(inputs + tables_at + place, value, inside)
    tl.debug_barrier()  # all have read the number of the step
    tl.store(inputs, step + 1)


@triton.jit(do_not_specialize=["rows"])
def record_kernel(
    inputs: tl.tensor,  # int32; see burst.py
    tokens: tl.tensor,  # [rows] int64
    logprobs: tl.tensor,  # [rows] float32
    sample_slots: tl.tensor,  # [rows] int64
    last_token: tl.tensor,  # [slots] int64, written
    results: tl.tensor,  # [steps, 3, rows] int32, written: see burst.py
    rows: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    base = results + tl.minimum(tl.load(inputs) - 1, tl.load(inputs + 2)) * 3 * rows
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        token = tl.load(tokens + row, inside, other=0)
        # Of logits that are not finite it may be anything; the next step must be able to read it.
        token = tl.maximum(0, tl.minimum(token, vocab - 1))
        logprob = tl.load(logprobs + row, inside, other=0.0)
        tl.store(last_token + tl.load(sample_slots + row, inside, other=0), token, inside)
        tl.store(base + row, token.to(tl.int32), inside)
        tl.store(base + rows + row, logprob.to(tl.int32, bitcast=True), inside)
        finite = tl.abs(logprob) < float("inf")
        tl.store(base + 2 * rows + row, tl.where(finite, 0, 1), inside)
