"""Greedy generations of small random models equal those of transformers, token for token."""

import numpy as np
import pytest
from tests.e2e.engine_rig import Generated
from tests.e2e.generate_cases import assert_samples, generation, prompt_and_tokens
from tests.e2e.random_models import (
    FAMILIES,
    KV_PAGES,
    VOCAB,
    MakeRig,
    RandomModel,
    RandomModels,
    random_tokens,
)
from tests.e2e.score_cases import TOLERANCE, ScoreCase

from stemserve.proto.v1 import inference_pb2

DECODE_KERNELS = (
    inference_pb2.KERNEL_PAGED,
    inference_pb2.KERNEL_CASCADE,
    inference_pb2.KERNEL_CODEC,
)
ANY_KERNEL = (*DECODE_KERNELS, inference_pb2.KERNEL_UNSPECIFIED, inference_pb2.KERNEL_NAIVE)
FEW_PAGES = 20  # for each call, but not for all at once
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 100)
NEW_TOKENS = 18  # past the end of a page
STOP = inference_pb2.FINISH_REASON_STOP
Rng = np.random.Generator


def greedy(prompt: list[int], **options: object) -> inference_pb2.GenerateRequest:
    return generation(prompt, **{"max_new_tokens": NEW_TOKENS, **options})


def prompt_of(
    rng: Rng, model: RandomModel, length: int, count: int = NEW_TOKENS
) -> tuple[list[int], list[int]]:
    return prompt_and_tokens(rng, model.oracle, VOCAB, length=length, count=count)


@pytest.mark.parametrize(
    ("budget", "kv_pages"), [(7, KV_PAGES), (13, KV_PAGES), (64, KV_PAGES), (64, FEW_PAGES)]
)
@pytest.mark.parametrize("family", FAMILIES)
async def test_any_prompts_together_cold_and_warm(
    models: RandomModels,
    make_rig: MakeRig,
    seed: int,
    family: str,
    budget: int,
    kv_pages: int,
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm(family, kv_pages=kv_pages)
    rig = make_rig(model, max_step_tokens=budget)
    pairs = [prompt_of(rng, model, length) for length in PROMPT_LENGTHS]
    score = ScoreCase(contexts=[pairs[4][0]], items=[[3], random_tokens(rng, 30)])
    for _ in range(2):
        counts = rng.permutation([1, 1, 1, 3, 3, 3]).tolist()
        requests = [
            greedy(prompt, n=n, kernel=int(rng.choice(ANY_KERNEL)))
            for (prompt, _), n in zip(pairs, counts, strict=True)
        ]
        *answers, scored = await rig.run(*requests, score.request)
        for (_, tokens), n, answer in zip(pairs, counts, answers, strict=True):
            assert_samples(answer, tokens, n=n)
        score.assert_right(model.oracle, scored)


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_each_forced_strategy_generates_what_transformers_does(
    models: RandomModels,
    make_rig: MakeRig,
    seed: int,
    family: str,
    kernel: inference_pb2.Kernel.ValueType,
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm(family)
    rig = make_rig(model)
    pairs = [prompt_of(rng, model, length) for length in (16, 33)]
    for _ in range(2):
        requests = [greedy(prompt, n=3, kernel=kernel) for prompt, _ in pairs]
        for (_, tokens), answer in zip(pairs, await rig.run(*requests), strict=True):
            assert_samples(answer, tokens, n=3)
    decoded = [group for group in rig.groups if group.phase == "decode"]
    assert len(decoded) >= 2 * (NEW_TOKENS - 1)
    assert {(group.kernel, group.reason) for group in decoded} == {(kernel, "forced")}


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (16, 15), (17, 16), (32, 31), (33, 32)])
async def test_b02_a_prompt_sent_twice_computes_its_last_token_only(
    models: RandomModels, make_rig: MakeRig, seed: int, length: int, cached: int
) -> None:
    model = models.lm("Llama")
    rig = make_rig(model)
    rng = np.random.default_rng(seed)
    prompt, tokens = prompt_of(rng, model, length, 1)
    for expected in (0, cached):
        answer = await rig.generate(greedy(prompt, max_new_tokens=1))
        assert_samples(answer, tokens, n=1)
        assert answer.usage.cached_tokens == expected
        assert answer.usage.computed_tokens == length - expected


@pytest.mark.parametrize("kernel", [inference_pb2.KERNEL_UNSPECIFIED, *DECODE_KERNELS])
async def test_a_talk_goes_on_from_what_was_generated_before(
    models: RandomModels,
    make_rig: MakeRig,
    seed: int,
    kernel: inference_pb2.Kernel.ValueType,
) -> None:
    model = models.lm("Qwen2")
    rig = make_rig(model)
    rng = np.random.default_rng(seed)
    prompt, tokens = prompt_of(rng, model, 17, 40)
    for done in range(0, 40, 10):
        answer = await rig.generate(
            greedy(prompt + tokens[:done], max_new_tokens=10, kernel=kernel)
        )
        assert_samples(answer, tokens[done : done + 10], n=1)
        assert answer.usage.cached_tokens == (17 + done - 1 if done else 0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_raw_and_equal(
    models: RandomModels, make_rig: MakeRig, seed: int, family: str
) -> None:
    """Whatever the temperature and the bias are, here and for the drawn sample beside it."""
    rng = np.random.default_rng(seed)
    model = models.lm(family)
    rig = make_rig(model, max_step_tokens=13)
    prompt, tokens = prompt_of(rng, model, 17)
    drawn_by = inference_pb2.SamplingParams(
        temperature=0.7, top_p=0.9, logit_bias={int(rng.integers(VOCAB)): 2.5}
    )
    best, drawn = await rig.run(
        greedy(prompt, top_logprobs=3), greedy(prompt, sampling=drawn_by, n=3, logprobs=True)
    )
    assert_samples(best, tokens, n=1)
    assert isinstance(best, Generated) and isinstance(drawn, Generated)
    for answer in (best, drawn):
        for sample, sampled in answer.tokens.items():
            expected = model.oracle.token_logprobs(prompt, sampled)
            np.testing.assert_allclose(answer.logprobs[sample], expected, atol=TOLERANCE)
    rows = model.oracle.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
    for row, top in zip(rows, best.top[0], strict=True):
        assert len(top) == 3
        np.testing.assert_allclose(list(top.values()), np.sort(row)[:-4:-1], atol=TOLERANCE)
        np.testing.assert_allclose(row[list(top)], list(top.values()), atol=TOLERANCE)


@pytest.mark.parametrize("kernel", ANY_KERNEL)
async def test_stop_ids_and_the_end_token_end_a_generation_not_before_its_minimum(
    models: RandomModels,
    make_rig: MakeRig,
    seed: int,
    kernel: inference_pb2.Kernel.ValueType,
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Llama")
    prompt, tokens = prompt_of(rng, model, 33)
    end = tokens[5]
    first = tokens.index(end) + 1
    rig = make_rig(model, eos_ids=frozenset({end}))
    by_eos, by_stop_id, ignoring, cut = await rig.run(
        greedy(prompt, kernel=kernel, ignore_eos=False, n=3),
        greedy(prompt, kernel=kernel, stop_token_ids=[end]),
        greedy(prompt, kernel=kernel),
        greedy(prompt, kernel=kernel, ignore_eos=False, max_new_tokens=first),
    )
    assert_samples(by_eos, tokens[:first], n=3, finish=STOP)
    assert_samples(by_stop_id, tokens[:first], n=1, finish=STOP)
    assert_samples(ignoring, tokens, n=1)
    assert_samples(cut, tokens[:first], n=1, finish=STOP)


async def test_end_tokens_are_banned_until_the_minimum(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Mistral")
    while True:
        prompt, tokens = prompt_of(rng, model, 15)
        banned = model.oracle.greedy(prompt, 10, banned=[tokens[3]])
        if banned is not None:
            break
    rig = make_rig(model, eos_ids=frozenset({tokens[3]}))
    answer = await rig.generate(
        greedy(prompt, ignore_eos=False, min_new_tokens=10, max_new_tokens=10, n=2)
    )
    assert_samples(answer, banned, n=2)
