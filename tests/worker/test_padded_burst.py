"""Decode steps in the shape of a captured graph: numbers of rows, padding, what is uploaded."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.worker.decode_rig import LIMITS
from tests.worker.decode_story import PAGES, SLOTS, Story, greedy

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.growth import NO_GROWTH, leaf_growth
from stemserve.kernels.fused.burst import FIELDS, HEADER, BurstShape
from stemserve.kernels.layout import HeadShape
from stemserve.worker.graphs.buckets import bucket_of, row_buckets
from stemserve.worker.graphs.padded_burst import InputsShape, PaddedBurst, padded_burst
from stemserve.worker.steps.step import Step, decode_step

SPARE = {"spare_page": PAGES, "spare_slot": SLOTS}
CODEC = CodecDecode(
    HeadShape(query_heads=8, kv_heads=2, head_dim=32, scale=0.1),
    torch.device("cpu"),
    DecodeNumbers(dtype=torch.float32),
    4,
)


def burst_of(seed: int, rows: int, trunk: int = 0) -> tuple[Step, PaddedBurst]:
    sequences = int(np.random.default_rng(seed).integers(1, rows + 1))
    story = Story.random(seed, sequences, trunk)
    story.prefill([greedy(s.slot) for s in story.sequences])
    steps: list[int] = story.rng.integers(1, 9, len(story.sequences)).tolist()
    step = decode_step(story.decode(story.sequences, steps), LIMITS)
    return step, padded_burst(step, rows, **SPARE)


def test_buckets_ascend_to_the_most_rows() -> None:
    for most in (0, 1, 3, 24, 100, 256, 300, 1000):
        buckets = row_buckets(most)
        assert buckets == sorted(set(buckets))
        assert buckets[-1:] == [most][: most > 0]
        for rows in range(1, most + 2):
            holding = [bucket for bucket in buckets if bucket >= rows]
            assert bucket_of(rows, buckets) == (holding[0] if holding else None)


@pytest.mark.parametrize("seed", range(5))
def test_sub_steps_are_those_of_the_step_and_padding_is_nobodys(seed: int) -> None:
    step, burst = burst_of(seed, 12)
    own = step.num_rows
    assert burst.fields.shape == (FIELDS, step.repeat, 12)
    for number in range(step.repeat):
        at = step.at(number)
        wanted = (at.token_ids, at.positions, at.kv_slots, at.samples.index)
        for field, values in zip(burst.fields[:, number], wanted, strict=True):
            assert np.array_equal(field[:own], values)
        leaves = at.layout.node_tokens[at.layout.segment_node]
        assert np.array_equal(burst.leaf_tokens[number, :own], leaves)
    assert (burst.fields[2, :, own:] == -1).all()
    assert (burst.fields[[0, 1, 3], :, own:] == 0).all()
    assert (burst.sample_slots[own:] == SLOTS).all()
    layout = burst.layout
    assert layout.num_segments == layout.num_rows == 12
    assert (layout.chain_tokens[own:] == 1).all()
    for segment in range(own, 12):
        assert layout.chain_pages(int(layout.segment_node[segment])).tolist() == [PAGES]
    assert PAGES not in step.layout.node_pages


@pytest.mark.parametrize("seed", range(5))
def test_what_is_uploaded_is_all_that_the_device_reads(seed: int) -> None:
    _, burst = burst_of(seed, 12)
    tables = CODEC.roomy_capacity(12, 300)
    host = CODEC.planner.take(burst.layout)
    growth = leaf_growth(host, tables, burst.leaf_tokens) if burst.steps > 1 else NO_GROWTH
    shape = InputsShape(
        burst=BurstShape(rows=12, steps=9, growth=1000),
        tables=tables,
        record=host.records.shape[1],
    )
    assert shape.misfit(host, growth) is None
    written = np.full(shape.size, -77, np.int32)
    uploaded = np.full(shape.size, -77, np.int32)
    for part in shape.pack(burst, host, growth, written):
        uploaded[part] = written[part]
    assert np.array_equal(uploaded, written)
    assert uploaded[:3].tolist() == [0, len(growth.places), burst.steps - 1]
    fields = uploaded[HEADER : shape.burst.slots_at].reshape(FIELDS, 9, 12)
    assert np.array_equal(fields[:, : burst.steps], burst.fields)


def test_plans_that_are_too_large_are_told() -> None:
    _, burst = burst_of(1, 12, trunk=80)
    host = CODEC.planner.take(burst.layout)
    growth = leaf_growth(host, CODEC.roomy_capacity(12, 300), burst.leaf_tokens)

    def misfit(pages: int, entries: int) -> str | None:
        shape = InputsShape(
            burst=BurstShape(rows=12, steps=9, growth=entries),
            tables=CODEC.roomy_capacity(12, pages),
            record=host.records.shape[1],
        )
        return shape.misfit(host, growth)

    pages, entries = len(host.streams.words), len(growth.places)
    assert pages > 64 and entries
    assert misfit(pages, entries) is None
    assert misfit(64, entries) == f"{pages} pages; the graph has 64"
    assert misfit(pages, entries - 1) == f"{entries} entries grow; the graph has {entries - 1}"
