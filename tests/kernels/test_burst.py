"""The rows of decode steps that follow each other without the host, against numpy."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stemserve.kernels.fused.burst import (
    FIELDS,
    HEADER,
    RESULTS,
    BurstRows,
    BurstShape,
    StepDraws,
    advance,
    record,
)
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import Int32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 400
TABLES = 900
VOCAB = 1000


def packed(shape: BurstShape, rng: np.random.Generator, steps: int, entries: int) -> Int32:
    flat = rng.integers(-9, 99, shape.tables_at + TABLES).astype(np.int32)
    flat[:3] = 0, entries, steps - 1
    fields = flat[HEADER : shape.slots_at].reshape(FIELDS, shape.steps, shape.rows)
    fields[0] = rng.integers(-SLOTS, VOCAB, fields[0].shape)
    flat[shape.slots_at : shape.places_at] = rng.permutation(SLOTS)[: shape.rows]
    places = rng.permutation(TABLES)[:entries]
    flat[shape.places_at : shape.places_at + entries] = places
    return flat


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [1, 3, 64, 300])
def test_each_step_has_its_rows_and_changes_its_entries(rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, entries = int(rng.integers(1, 6)), int(rng.integers(0, 600))
    shape = BurstShape(rows=rows, steps=6, growth=700)
    flat = packed(shape, rng, steps, entries)
    inputs = device_tensor(flat.copy(), DEVICE)
    last = device_tensor(rng.integers(0, VOCAB, SLOTS + 1), DEVICE)
    found = BurstRows.empty(rows + 5, DEVICE).first(rows)
    fields = flat[HEADER : shape.slots_at].reshape(FIELDS, shape.steps, rows)
    values = flat[shape.values_at : shape.values_at + steps * entries].reshape(steps, entries)
    places = flat[shape.places_at : shape.places_at + entries]
    tables = flat[shape.tables_at :].copy()
    for number in range(steps + 2):
        advance(inputs, shape, last, found)
        step = min(number, steps - 1)  # the last one comes again
        ids = fields[0, step].astype(np.int64)
        expected = np.where(ids < 0, last.cpu().numpy()[np.maximum(0, -1 - ids)], ids)
        tables[places] = values[step]
        slots = flat[shape.slots_at : shape.places_at]
        wanted = (expected, fields[1, step], fields[2, step], slots, fields[3, step])
        for part, numbers in zip(found, wanted, strict=True):
            assert np.array_equal(part.cpu().numpy(), numbers)
        assert np.array_equal(inputs.cpu().numpy()[shape.tables_at :], tables)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_what_a_step_draws_is_kept(rows: int) -> None:
    rng = np.random.default_rng(rows)
    shape = BurstShape(rows=rows, steps=3, growth=0)
    inputs = device_tensor(packed(shape, rng, 3, 0), DEVICE)
    last = torch.full((SLOTS + 1,), -1, dtype=torch.int64, device=DEVICE)
    results = torch.full((3, RESULTS, rows), -7, dtype=torch.int32, device=DEVICE)
    now = BurstRows.empty(rows, DEVICE)
    for step in range(3):
        advance(inputs, shape, last.clamp_min(0), now)
        tokens = device_tensor(rng.integers(0, VOCAB, rows), DEVICE)
        logprobs = device_tensor(-rng.random(rows).astype(np.float32), DEVICE)
        logprobs[0] = [torch.nan, torch.inf, -0.5][step]
        tokens[-1] = 10 * VOCAB if step == 1 else tokens[-1]  # of logits that are not finite
        record(inputs, StepDraws(tokens, logprobs), now.sample_slots, last, results, VOCAB)
        kept = tokens.clamp_max(VOCAB - 1)
        assert torch.equal(results[step, 0].long(), kept)
        assert torch.equal(results[step, 1], logprobs.view(torch.int32))
        assert torch.equal(results[step, 2] > 0, ~logprobs.isfinite())
        assert torch.equal(last[now.sample_slots], kept)
    assert int((last >= 0).sum()) == rows
