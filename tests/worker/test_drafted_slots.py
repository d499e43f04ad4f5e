"""Slots that are sampled at several rows of a step, to verify a draft."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.plans import LIMITS, PlanBuilder, blob
from tests.worker.tiny_model import VOCAB, TinyRunner, make_runner, save_tiny_model

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_float32, decode_int32
from stemserve.worker.steps.step import decode_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT_TOKENS = 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, seed=5)
    return folder


def sampler(slot: int, **fields: object) -> worker_pb2.Sampler:
    message = worker_pb2.Sampler(slot=slot, temperature=1.0, top_p=1.0, seed=77 + slot)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


KINDS: Mapping[str, Mapping[str, object]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "top_k": {"top_k": 3},
    "min_tokens": {"min_tokens_banned_ids": blob(list(range(0, VOCAB, 2))), "min_new_tokens": 3},
    "read": {"top_logprobs": 3, "logprob_ids": blob([1, 2])},
    "allowed": {"allowed_ids": blob([3, 4, 5, 6]), "temperature": 2.0},
}


def generate(
    tiny: TinyRunner, prompt: list[int], kind: str, draft: list[int]
) -> tuple[list[int], list[float]]:
    """The prompt, then the draft behind its first token; all that is drawn."""
    pages = list(range(10))
    plan = PlanBuilder()
    first = plan.prefill(plan.node(len(prompt), pages[: -(-len(prompt) // 4)]), prompt)
    plan.sample(first + len(prompt) - 1, 0)
    plan.samplers = [sampler(0, **KINDS[kind])]
    result = tiny.runner.step(plan.build())
    tokens = decode_int32("", result.sampled_tokens).tolist()
    logprobs = decode_float32("", result.sampled_logprobs).tolist()
    plan = PlanBuilder()
    for at, token in enumerate([tokens[0], *draft]):  # leaves in the same page, one behind another
        length = len(prompt) + 1 + at
        plan.sample(plan.decode(plan.node(length, pages[: -(-length // 4)]), token), 0, 1 + at)
    result = tiny.runner.step(plan.build(2))
    tokens += decode_int32("", result.sampled_tokens).tolist()
    return tokens, logprobs + decode_float32("", result.sampled_logprobs).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_right_draft_each_row_draws_what_it_draws_alone(
    folder: Path, device: str, kind: str
) -> None:
    rng = np.random.default_rng([3, len(kind)])
    prompt: list[int] = rng.integers(0, VOCAB, PROMPT_TOKENS).tolist()
    tiny = make_runner(folder, device=torch.device(device))
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(6):  # each time a token more of the draft is right
        tokens, logprobs = generate(tiny, prompt, kind, tokens[1:])
    wrong = [*tokens[1:3], (tokens[3] + 1) % VOCAB, 0]
    again, others = generate(tiny, prompt, kind, tokens[1:])
    assert again[: len(tokens)] == tokens
    cut, cut_logprobs = generate(tiny, prompt, kind, wrong)
    assert cut[:4] == tokens[:4]
    assert others[: len(logprobs)] == pytest.approx(logprobs, abs=1e-4)
    assert cut_logprobs[:4] == pytest.approx(logprobs[:4], abs=1e-4)


def drafting(samplers: list[worker_pb2.Sampler]) -> PlanBuilder:
    plan = PlanBuilder()
    row = plan.prefill(plan.node(3, [0]), [7, 8, 9])
    for at in range(3):
        plan.sample(row + at, 1, at)
    plan.samplers = samplers
    return plan


def test_a_drafted_slot_holds_no_token(folder: Path) -> None:
    tiny = make_runner(folder)
    plan = drafting([sampler(1)])
    tiny.runner.step(plan.build())
    behind = PlanBuilder()
    behind.sample(behind.decode(behind.node(4, [0]), -1 - 1), 1, 3)
    with pytest.raises(BadPlan, match="no token was sampled into slot 1"):
        tiny.runner.step(behind.build(2))
    behind.token_ids = [5]
    tiny.runner.step(behind.build(2))
    last = PlanBuilder()
    last.sample(last.decode(last.node(5, [0, 1]), -1 - 1), 1, 4)
    tiny.runner.step(last.build(3))


def test_under_penalties_a_slot_is_sampled_at_one_row(folder: Path) -> None:
    tiny = make_runner(folder)
    plan = drafting([sampler(1, presence_penalty=0.5)])
    with pytest.raises(BadPlan, match="penalties"):
        tiny.runner.step(plan.build())
    plan.samples = plan.samples[:1]
    tiny.runner.step(plan.build())
    with pytest.raises(BadPlan, match="penalties"):
        tiny.runner.step(drafting([]).build(2))


def test_a_masked_slot_is_sampled_at_one_row() -> None:
    plan = drafting([sampler(1)]).build()
    allowed = bytes([255] * -(-LIMITS.vocab_size // 8))
    plan.masks.append(worker_pb2.TokenMask(slot=1, allowed=allowed))
    with pytest.raises(BadPlan, match="masks: a slot is sampled at several rows"):
        decode_step(plan, LIMITS)


def test_a_burst_samples_each_slot_at_one_row() -> None:
    plan = PlanBuilder()
    for page in (0, 1):
        plan.sample(plan.decode(plan.node(2, [page]), 5), 1, page)
    plan.samplers = [sampler(1)]
    burst = plan.build()
    burst.repeat, burst.row_steps = 2, blob([2, 2])
    burst.kv_slots = blob([1, 5, 2, 6])
    with pytest.raises(BadPlan, match="a burst samples each slot at one row"):
        decode_step(burst, LIMITS)
