"""Decode graphs with fixed splits: a sample's bits in any bucket, beside anybody, in any burst."""

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.row_products import alike_rows
from tests.worker.decode_rig import Rig, make_rig
from tests.worker.decode_story import Story, drawn, greedy

from stemserve.proto.v1 import worker_pb2

__all__ = ["alike_rows"]

SPLIT = 64  # few tokens, so that a leaf's end moves over the end of a part
STEPS = 5
# Sequence 1 draws at random, 2 is greedy: on a CPU the likeliest token is found another way alone
# than beside samples that are drawn, but a CPU has no graphs outside of tests.
CASES = [("cpu", 1), *(pytest.param("cuda", own, marks=pytest.mark.gpu) for own in (1, 2))]


@pytest.fixture
def seed() -> int:
    """Fresh every run; a failing test shows it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def samplers(story: Story) -> list[worker_pb2.Sampler]:
    some = [greedy(s.slot) for s in story.sequences]
    for number, sampler in enumerate(some):
        if number % 2:
            sampler.temperature, sampler.top_k, sampler.seed = 0.9, 20, number
    return some


def pairs(rig: Rig, plan: worker_pb2.StepPlan, row: int) -> list[tuple[int, float]]:
    """What one row drew, in all sub-steps."""
    result = rig.step(plan)
    assert [group.reason for group in result.groups] == ["graph"]
    tokens, logprobs = (values.reshape(max(1, plan.repeat), -1)[:, row] for values in drawn(result))
    return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


@pytest.mark.parametrize(("device", "own"), CASES)
def test_a_burst_alone_draws_what_single_steps_beside_others_draw(
    tmp_path: Path, device: str, own: int, seed: int
) -> None:
    where = torch.device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    head_dim = 32 if device == "cpu" else 128
    story = Story.random(seed, sequences=3, trunk=2)
    prefill = story.prefill(samplers(story))
    beside, alone = (
        make_rig(tmp_path, where, dtype, buckets, head_dim=head_dim, fixed_split=SPLIT)
        for buckets in ((8,), (2, 16))
    )
    for rig in (beside, alone):
        rig.step(prefill)
    expected = pairs(alone, story.decode(story.sequences[own : own + 1], [STEPS]), 0)
    found: list[tuple[int, float]] = []
    for _ in range(STEPS):
        found += pairs(beside, story.decode(story.sequences, [1] * 3), own)
        story.advance(story.sequences, [1] * 3)
    assert found == expected
