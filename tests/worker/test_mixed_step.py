"""Requests of different kinds in one step: each gets what it would get alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.worker.plans import PlanBuilder, blob
from tests.worker.tiny_model import VOCAB, make_runner, save_tiny_model
from transformers import LlamaForCausalLM

from stemserve.kernels.strategy import Kernel
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, decode_int32, encode_float32

Ask = Callable[[PlanBuilder, int, int], None]  # what a request reads at its last row, in its slot


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module", autouse=True)
def model(folder: Path) -> LlamaForCausalLM:
    return save_tiny_model(folder, seed=21)


def labels(*ids: int) -> Ask:
    return lambda plan, row, slot: plan.gather(row, ids)


def likelihood(plan: PlanBuilder, row: int, slot: int) -> None:
    plan.gather(row - 2, [4])
    plan.gather(row - 1, [5])


def generate(**fields: object) -> Ask:
    def ask(plan: PlanBuilder, row: int, slot: int) -> None:
        sampler = worker_pb2.Sampler(slot=slot, seed=77)
        for name, value in fields.items():
            setattr(sampler, name, value)
        plan.samplers.append(sampler)
        plan.sample(row, slot, index=3)

    return ask


def nothing(plan: PlanBuilder, row: int, slot: int) -> None:
    """A prompt that is not finished."""


BIASED = {"bias_ids": blob([3, 9]), "bias_values": encode_float32(np.array([4.0, -100.0]))}
REQUESTS: list[Ask] = [
    labels(0, 2),
    generate(),
    labels(1, 2, 3),
    likelihood,
    generate(temperature=1.0, top_p=0.9, top_logprobs=3, **BIASED),
    nothing,
    generate(temperature=1.0, top_logprobs=8, banned_ids=blob(range(0, VOCAB, 2))),
    generate(temperature=0.8, top_k=5, min_p=0.1),
]


def add(plan: PlanBuilder, number: int) -> None:
    tokens = np.random.default_rng(number).integers(0, VOCAB, 5 + number).tolist()
    pages = range(4 * number, 4 * number + -(-len(tokens) // 4))
    row = plan.prefill(plan.node(len(tokens), pages), tokens) + len(tokens) - 1
    REQUESTS[number](plan, row, number)


@pytest.mark.parametrize("forced", [None, Kernel.NAIVE, Kernel.CUSTOM_MASK])
def test_b31_every_reply_of_a_mixed_step_equals_its_solo_run(
    folder: Path, forced: Kernel | None
) -> None:
    plan = PlanBuilder()
    alone: list[worker_pb2.StepResult] = []
    for number in range(len(REQUESTS)):
        add(plan, number)
        solo = PlanBuilder()
        add(solo, number)
        alone.append(make_runner(folder, forced=forced).runner.step(solo.build()))
    mixed = make_runner(folder, forced=forced).runner.step(plan.build())

    for name in ("gather_logprobs", "sampled_logprobs", "top_logprobs"):
        found = decode_float32(name, getattr(mixed, name))
        expected = np.concatenate([decode_float32(name, getattr(r, name)) for r in alone])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for name in ("gather_argmax", "sampled_tokens", "top_ids"):
        found_ids = decode_int32(name, getattr(mixed, name))
        expected_ids = np.concatenate([decode_int32(name, getattr(r, name)) for r in alone])
        assert found_ids.tolist() == expected_ids.tolist()
    assert decode_int32("", mixed.top_indptr).tolist() == [0, 0, 3, 11, 11]
    assert not mixed.failed_rows


def test_the_order_of_requests_does_not_matter(folder: Path) -> None:
    order = np.random.default_rng(8).permutation(len(REQUESTS)).tolist()
    tokens: list[dict[int, int]] = []
    for numbers in (range(len(REQUESTS)), order):
        plan = PlanBuilder()
        for number in numbers:
            add(plan, number)
        result = make_runner(folder).runner.step(plan.build())
        slots = [slot for _, slot, _ in plan.samples]
        drawn = decode_int32("", result.sampled_tokens).tolist()
        tokens.append(dict(zip(slots, drawn, strict=True)))
    assert tokens[0] == tokens[1]


def test_many_samples_of_one_row_differ_by_their_seeds_only(folder: Path) -> None:
    plan = PlanBuilder()
    row = plan.prefill(plan.node(3, [0]), [1, 2, 3]) + 2
    for slot in range(8):
        seed = 5 if slot < 2 else slot + 10
        plan.samplers.append(worker_pb2.Sampler(slot=slot, temperature=3.0, seed=seed))
        plan.sample(row, slot)
    drawn = decode_int32("", make_runner(folder).runner.step(plan.build()).sampled_tokens).tolist()
    assert drawn[0] == drawn[1]
    assert len(set(drawn[1:])) > 3
