"""Calls whose drafts are verified get the tokens that they get without drafts."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.generate_cases import generation
from tests.e2e.in_process_engine import InProcessWorker
from tests.e2e.random_models import FAMILIES, RandomModels, random_tokens
from tests.service.serving import byte_tokenizer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.text.tokenizer import Tokenizer

TOLERANCE = 1e-5  # rows in other company round otherwise
ALWAYS = DraftPolicy(default_tokens=8, least_gain=0)
NEVER = DraftPolicy()


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    yield replace(byte_tokenizer(), eos_ids=frozenset())


def sampling(seed: int, **options: Any) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(temperature=1.0, seed=seed, **options)


def repeating_calls(rng: np.random.Generator) -> list[inference_pb2.GenerateRequest]:
    """Calls of all kinds that come to repeat themselves."""
    trunk, few = random_tokens(rng, 39), rng.integers(0, 256, 3).tolist()
    loop = random_tokens(rng, 7)
    return [
        generation(loop * 4, max_new_tokens=60, logprobs=True, top_logprobs=2),
        generation([*trunk, 7], max_new_tokens=45, n=4, sampling=sampling(5, top_k=2)),
        generation(
            trunk[:16],
            max_new_tokens=41,
            n=2,
            sampling=sampling(6, allowed_token_ids=few),
            logprobs=True,
            top_logprobs=3,
            logprob_token_ids=[int(token) for token in few],
        ),
        generation(
            loop * 2,
            max_new_tokens=50,
            n=3,
            sampling=sampling(7, top_p=0.3, logit_bias={int(token): 8.0 for token in few}),
            min_new_tokens=25,
            stop_token_ids=[int(few[0])],
        ),
        generation(
            trunk, max_new_tokens=40, sampling=sampling(8, top_k=3), stop=["a", "e", "\x03"]
        ),
        generation(trunk[:30], max_new_tokens=40, prompt_logprobs=True),
    ]


async def answers(
    worker: InProcessWorker,
    tokenizer: Tokenizer,
    drafts: DraftPolicy,
    requests: list[inference_pb2.GenerateRequest],
) -> list[Generated]:
    rig = EngineRig(worker, tokenizer, drafts=drafts)
    await rig.generate(generation([1, 2, 3], max_new_tokens=8))  # so that its speed is known
    found = await rig.run(*requests)
    rig.batcher.clear_cache()
    rig.batcher.check_idle()
    rig.close()
    generated = [answer for answer in found if isinstance(answer, Generated)]
    assert len(generated) == len(requests), found
    return generated


def assert_same(found: Generated, wanted: Generated, *, abs_error: float = TOLERANCE) -> None:
    assert found.tokens == wanted.tokens
    assert (found.text, found.finish) == (wanted.text, wanted.finish)
    assert found.usage.output_tokens == wanted.usage.output_tokens
    for sample, logprobs in wanted.logprobs.items():
        assert found.logprobs[sample] == pytest.approx(logprobs, abs=abs_error)
        for some, others in zip(found.top[sample], wanted.top[sample], strict=True):
            assert_alike(some, others, abs_error)
        for row, other in zip(
            found.asked.get(sample, []), wanted.asked.get(sample, []), strict=True
        ):
            assert row == pytest.approx(other, abs=abs_error)
    assert found.prompt_logprobs == pytest.approx(wanted.prompt_logprobs, abs=abs_error)


def assert_alike(some: Mapping[int, float], others: Mapping[int, float], abs_error: float) -> None:
    assert some == pytest.approx(others, abs=abs_error)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model_seed", range(2))
async def test_calls_of_all_kinds_get_what_they_get_without(
    models: RandomModels,
    tokenizer: Tokenizer,
    family: str,
    model_seed: int,
    rng: np.random.Generator,
) -> None:
    worker = models.seeded(family, model_seed).worker
    requests = repeating_calls(rng)
    plain = await answers(worker, tokenizer, NEVER, requests)
    drafting = await answers(worker, tokenizer, ALWAYS, requests)
    for found, wanted in zip(drafting, plain, strict=True):
        assert_same(found, wanted)
        assert wanted.usage.drafted_tokens == 0
    assert sum(answer.usage.accepted_tokens for answer in drafting) > 20
    number = int(rng.integers(len(requests)))
    (alone,) = await answers(worker, tokenizer, ALWAYS, [requests[number]])
    assert_same(alone, plain[number])


@pytest.mark.parametrize("draft_tokens", [1, 3, 8, 32])
async def test_a_call_says_how_many_tokens_a_draft_has(
    models: RandomModels, tokenizer: Tokenizer, draft_tokens: int, rng: np.random.Generator
) -> None:
    worker = models.lm("Llama").worker
    request = generation(
        random_tokens(rng, 5) * 4, max_new_tokens=80, sampling=sampling(1, allowed_token_ids=[5])
    )
    request.draft_tokens = draft_tokens
    rig = EngineRig(worker, tokenizer, drafts=replace(ALWAYS, default_tokens=0))
    await rig.generate(generation([1, 2, 3], max_new_tokens=8))
    rig.engine.plans.clear()
    answer = await rig.generate(request)
    widest = max(len(unpack_int32(plan.token_ids)) for plan in rig.engine.plans[1:])
    rig.close()
    assert 1 < widest <= 1 + draft_tokens
    assert answer.usage.drafted_tokens >= answer.usage.accepted_tokens > 0
    assert len(rig.engine.plans) == 80 - answer.usage.accepted_tokens


async def test_what_runs_beside_drafts_is_what_it_was(
    models: RandomModels, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    """Searches, constraints and penalties have no drafts. There are some once those have ended."""
    worker = models.lm("Qwen3").worker
    same = sampling(2, allowed_token_ids=[5])  # drafts of it are never wrong for long
    drafting = generation(random_tokens(rng, 5) * 4, max_new_tokens=300, sampling=same)
    search = generation(random_tokens(rng, 20), max_new_tokens=20, n=3)
    search.ClearField("sampling")
    search.beam_search.width = 3
    penalised = generation(
        random_tokens(rng, 6) * 3,
        max_new_tokens=40,
        sampling=sampling(3, top_k=2, repetition_penalty=1.05),
    )
    chosen = generation(random_tokens(rng, 20), max_new_tokens=30)
    chosen.ignore_eos = False
    chosen.regex = "(ab)+c"
    requests = [drafting, search, penalised, chosen]
    eos = replace(tokenizer, eos_ids=frozenset([0]))
    plain = await answers(worker, eos, NEVER, requests)
    found = await answers(worker, eos, ALWAYS, requests)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other)
    assert [answer.usage.drafted_tokens > 0 for answer in found] == [True, False, False, False]


async def test_deterministic_results_are_the_same_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    models = RandomModels(tmp_path_factory, flags=["--deterministic"])
    worker = models.lm("Llama").worker
    requests = repeating_calls(rng)
    plain = await answers(worker, tokenizer, NEVER, requests)
    drafting = await answers(worker, tokenizer, ALWAYS, requests)
    for found, wanted in zip(drafting, plain, strict=True):
        assert_same(found, wanted, abs_error=0.0)
    assert sum(answer.usage.accepted_tokens for answer in drafting) > 20


async def test_few_pages_suspend_generations_and_change_nothing(
    models: RandomModels, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    worker = models.lm("Llama").worker
    few = replace(worker, facts=replace(worker.facts, kv_pages=14))
    requests = [
        generation(
            random_tokens(rng, 5) * 4, max_new_tokens=60, n=2, sampling=sampling(seed, top_k=2)
        )
        for seed in range(4)
    ]
    plain = await answers(worker, tokenizer, NEVER, requests)
    for found, wanted in zip(await answers(few, tokenizer, ALWAYS, requests), plain, strict=True):
        assert_same(found, wanted)


async def test_cancelled_calls_leave_no_pages_behind(
    models: RandomModels, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    rig = EngineRig(models.lm("Llama").worker, tokenizer, drafts=ALWAYS)
    await rig.generate(generation([1, 2, 3], max_new_tokens=8))
    for stop_after in rng.integers(1, 25, 8).tolist():
        prompt = random_tokens(rng, 5) * 4
        call = asyncio.ensure_future(rig.generate(generation(prompt, max_new_tokens=60, n=2)))
        for _ in range(stop_after):
            await asyncio.sleep(0)
            rig.engine.turn()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        for name in [f"generate-{n}:" for n in range(40)]:
            rig.batcher.cancel(name)
        while rig.engine.turn():
            pass
    rig.batcher.clear_cache()
    rig.batcher.check_idle()
    rig.close()
