"""Log-probabilities of a prompt's own tokens are transformers', whatever the cache holds."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.e2e.engine_rig import Generated
from tests.e2e.generate_cases import generation, prompt_and_tokens
from tests.e2e.oracle import Oracle
from tests.e2e.random_models import (
    FAMILIES,
    VOCAB,
    MakeRig,
    RandomModels,
    random_tokens,
)
from tests.e2e.score_cases import TOLERANCE

from stemserve.proto.v1 import inference_pb2

NEW_TOKENS = 12


def reading(prompt: Sequence[int], **options: object) -> inference_pb2.GenerateRequest:
    return generation(prompt, **{"max_new_tokens": NEW_TOKENS, "prompt_logprobs": True, **options})


def assert_read(answer: object, oracle: Oracle, prompt: list[int], *, n: int = 1) -> Generated:
    assert isinstance(answer, Generated), answer
    assert len(answer.prompt_logprobs) == len(prompt) - 1
    if len(prompt) > 1:
        wanted = oracle.token_logprobs(prompt[:1], prompt[1:])
        assert np.abs(np.array(answer.prompt_logprobs) - wanted).max() < TOLERANCE
    usage = answer.usage
    assert usage.computed_tokens == len(prompt)
    assert usage.cached_tokens == 0
    assert usage.shared_tokens == len(prompt) * (n - 1)
    return answer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [7, 64])
async def test_prompts_are_read_alike_with_and_without_a_cache(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator, family: str, budget: int
) -> None:
    model = models.lm(family)
    rig = make_rig(model, max_step_tokens=budget)
    for length in (1, 2, 16, 17, 33, 60):
        prompt, tokens = prompt_and_tokens(
            rng, model.oracle, VOCAB, length=length, count=NEW_TOKENS
        )
        cold = await rig.generate(reading(prompt))
        warm = await rig.generate(reading(prompt, n=2))
        longer = [*prompt, *tokens[:5], 7]
        behind = await rig.generate(reading(longer))
        plain = await rig.generate(generation(prompt, max_new_tokens=NEW_TOKENS))
        assert_read(cold, model.oracle, prompt)
        assert_read(warm, model.oracle, prompt, n=2)
        assert_read(behind, model.oracle, longer)
        assert cold.tokens[0] == warm.tokens[0] == warm.tokens[1] == plain.tokens[0] == tokens
        assert plain.prompt_logprobs == []
        assert plain.usage.cached_tokens == length - 1


@pytest.mark.parametrize("kv_pages", [700, 20])
async def test_prompts_are_read_together_with_others_also_when_pages_run_out(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator, kv_pages: int
) -> None:
    model = models.lm("Llama", kv_pages=kv_pages)
    rig = make_rig(model, max_step_tokens=40)
    trunk = random_tokens(rng, 35)
    prompts = [trunk, [*trunk, 5], trunk[:20], [*trunk[:33], 9, 9], random_tokens(rng, 50)]
    for _ in range(2):
        requests = [
            reading(prompt, max_new_tokens=30, n=1 + (n == 1)) for n, prompt in enumerate(prompts)
        ]
        requests.append(generation(trunk, max_new_tokens=30))
        *answers, plain = await rig.run(*requests)
        assert isinstance(plain, Generated)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            read = assert_read(answer, model.oracle, prompt, n=1 + (number == 1))
            if prompt == trunk:
                assert read.tokens == plain.tokens
