"""Penalised generations equal what transformers' processors give, in any company and slot."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e import engine_rig
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.generate_cases import assert_samples, generation
from tests.e2e.oracle import Oracle, decided
from tests.e2e.random_models import VOCAB, MakeRig, RandomModels, random_tokens
from tests.service.serving import byte_tokenizer
from transformers import RepetitionPenaltyLogitsProcessor

from stemserve.proto.v1 import inference_pb2
from stemserve.service.batching.batcher import BatcherLimits
from stemserve.service.text.tokenizer import Tokenizer

NEW_TOKENS = 40
Penalties = tuple[float, float, float]  # repetition, presence, frequency
CASES: list[Penalties] = [(1.3, 0.0, 0.0), (1.0, 0.4, 0.2), (1.2, -0.1, 0.3), (0.8, 0.0, 0.5)]


@pytest.fixture(scope="module")
def bursting(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory, flags=["--max-burst-steps", "4"])


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    yield replace(byte_tokenizer(), eos_ids=frozenset())


def sampling(case: Penalties, **options: object) -> inference_pb2.SamplingParams:
    repetition, presence, frequency = case
    message = inference_pb2.SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    for name, value in options.items():
        setattr(message, name, value)
    return message


def expected(
    oracle: Oracle, prompt: list[int], case: Penalties, count: int = NEW_TOKENS
) -> list[int] | None:
    """None where the lead of a token is a matter of rounding."""
    repetition, presence, frequency = case
    processor: Any = RepetitionPenaltyLogitsProcessor(repetition)
    tokens: list[int] = []
    for _ in range(count):
        sequence = [*prompt, *tokens]
        logits = torch.tensor(oracle.logits(sequence)[-1:])
        row = processor(torch.tensor([sequence]), logits)[0].numpy()
        drawn = np.bincount(np.array(tokens, np.int64), minlength=VOCAB)
        row = row - frequency * drawn - presence * (drawn > 0)
        if not decided(row):
            return None
        tokens.append(int(row.argmax()))
    return tokens


def prompt_and_expected(
    rng: np.random.Generator, oracle: Oracle, length: int, case: Penalties
) -> tuple[list[int], list[int]]:
    while True:
        prompt = random_tokens(rng, length)
        tokens = expected(oracle, prompt, case)
        if tokens is not None:
            return prompt, tokens


@pytest.mark.parametrize("kv_pages", [700, 20])
async def test_penalties_against_transformers_also_when_pages_run_out(
    models: RandomModels, make_rig: MakeRig, seed: int, kv_pages: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Llama", kv_pages=kv_pages)
    pairs = [
        prompt_and_expected(rng, model.oracle, length, case)
        for length, case in zip((1, 17, 33, 48), CASES, strict=True)
    ]
    rig = make_rig(model)
    for _ in range(2):
        requests = [
            generation(prompt, max_new_tokens=NEW_TOKENS, n=2, sampling=sampling(case))
            for (prompt, _), case in zip(pairs, CASES, strict=True)
        ]
        for (_, tokens), answer in zip(pairs, await rig.run(*requests), strict=True):
            assert_samples(answer, tokens, n=2)
    again = [m for plan in rig.engine.plans for m in plan.samplers if m.generated_ids]
    assert bool(again) is (kv_pages == 20)


async def test_bursts_draw_what_single_steps_draw(
    bursting: RandomModels,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    monkeypatch.setattr(engine_rig, "BatcherLimits", partial(BatcherLimits, max_burst_s=60.0))
    worker = bursting.lm("Qwen3").worker
    requests = [
        generation(
            random_tokens(rng, 9 + number),
            max_new_tokens=21 + number,
            n=2,
            sampling=sampling(case, temperature=0.9, seed=number),
        )
        for number, case in enumerate(CASES)
    ]
    answers: list[list[Generated]] = []
    for burst in (1, 4):
        limited = replace(worker, facts=replace(worker.facts, max_burst_steps=burst))
        rig = EngineRig(limited, tokenizer)
        await rig.generate(generation([1, 2, 3], max_new_tokens=8))  # so that its speed is known
        rig.engine.plans.clear()
        found = await rig.run(*requests)
        rig.close()
        assert max(max(1, plan.repeat) for plan in rig.engine.plans) == burst
        answers.append([answer for answer in found if isinstance(answer, Generated)])
    assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    assert len(answers[0]) == len(requests)
