"""Generate calls and mixed batches with known right answers, on real models."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.e2e.engine_rig import Generated, Request
from tests.e2e.generate_cases import assert_samples, generation, prompt_and_tokens
from tests.e2e.random_models import VOCAB, MakeRig, RandomModels, random_tokens
from tests.e2e.score_cases import TOLERANCE, ScoreCase

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import InvalidRequest, NeverFits

Rng = np.random.Generator


def refusal(answer: object) -> str:
    assert isinstance(answer, InvalidRequest), answer
    return str(answer)


def generated(answer: object) -> Generated:
    assert isinstance(answer, Generated), answer
    return answer


@pytest.mark.parametrize("calls", [1, 7, 8, 128])
async def test_b23_many_equal_prompts_with_one_long_prefix(
    models: RandomModels, make_rig: MakeRig, calls: int
) -> None:
    """8 query heads on 2 KV heads; the prompt is the same in all runs."""
    rng = np.random.default_rng(23)
    model = models.lm("Llama", query_heads=8)
    prompt, tokens = prompt_and_tokens(rng, model.oracle, VOCAB, length=1028, count=4)
    for kernel in (
        inference_pb2.KERNEL_CASCADE,
        inference_pb2.KERNEL_CODEC,
        inference_pb2.KERNEL_PAGED,
        inference_pb2.KERNEL_UNSPECIFIED,
    ):
        rig = make_rig(model, max_step_tokens=512)
        request = generation(prompt, max_new_tokens=4, kernel=kernel, logprobs=True)
        answers = await rig.run(*[request] * calls)
        first = assert_samples(answers[0], tokens, n=1).logprobs[0]
        for answer in answers:
            found = assert_samples(answer, tokens, n=1)
            assert found.logprobs[0] == pytest.approx(first, abs=1e-5)
        computed = sum(generated(answer).usage.computed_tokens for answer in answers)
        assert computed <= 1028 + (calls - 1) * 4  # what lies behind the last full page


async def test_b29_ids_outside_the_vocabulary_are_refused_while_streams_go_on(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    model = models.lm("Llama")
    rig = make_rig(model)
    pairs = [
        prompt_and_tokens(rng, model.oracle, VOCAB, length=length, count=12)
        for length in (3, 16, 40)
    ]
    streams = [generation(prompt, max_new_tokens=12) for prompt, _ in pairs]
    bad: list[Request] = []
    for token_id in (-1, VOCAB, VOCAB + 1, 1 << 31):
        labels = inference_pb2.LabelProbabilities(label_token_ids=[0, token_id])
        bad.append(inference_pb2.ScoreRequest(query="q", items=["i"], label_probabilities=labels))
        for sampling in (
            inference_pb2.SamplingParams(logit_bias={token_id: 1.0}),
            inference_pb2.SamplingParams(banned_token_ids=[token_id]),
        ):
            bad.append(generation([1], sampling=sampling))
        bad.append(generation([1], stop_token_ids=[token_id]))
    bad += [
        generation([1], sampling=inference_pb2.SamplingParams(logit_bias={0: bias}))
        for bias in (math.nan, math.inf, -math.inf)
    ]
    bad.append(generation([VOCAB]))
    answers = await rig.run(*streams, *bad)
    for (_, tokens), answer in zip(pairs, answers, strict=False):
        assert_samples(answer, tokens, n=1)
    assert all(refusal(answer) for answer in answers[3:])


async def test_b29_the_logits_behind_the_tokenizers_ids_are_scored_and_have_no_text(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    """The model has more logits than the tokenizer has tokens."""
    model = models.lm("Llama")
    rig = make_rig(model)
    case = ScoreCase(contexts=[random_tokens(rng, 5)], items=[[VOCAB - 1]], labels=[[VOCAB - 2]])
    case.assert_right(model.oracle, await rig.score(case.request))
    prompt, tokens = prompt_and_tokens(rng, model.oracle, VOCAB, length=9, count=3)
    wanted = inference_pb2.SamplingParams(temperature=0.0, logit_bias={VOCAB - 1: 100.0})
    unwanted = inference_pb2.SamplingParams(temperature=1.0, logit_bias={tokens[0]: -100.0})
    padded, others = await rig.run(
        generation(prompt, max_new_tokens=3, sampling=wanted),
        generation(prompt, max_new_tokens=1, sampling=unwanted, n=64),
    )
    assert assert_samples(padded, [VOCAB - 1] * 3, n=1).text == {0: ""}
    assert all(sample != [tokens[0]] for sample in generated(others).tokens.values())


async def test_b32_cold_samples_are_greedy_among_hot_ones_and_banned_tokens(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    """All but 20 tokens are banned in the last one."""
    model = models.lm("Llama")
    rig = make_rig(model)
    cold = [prompt_and_tokens(rng, model.oracle, VOCAB, length=9, count=8) for _ in range(3)]
    banned = sorted(rng.permutation(VOCAB)[20:].tolist())
    hot = [
        generation(
            random_tokens(rng, 7),
            max_new_tokens=8,
            logprobs=True,
            sampling=inference_pb2.SamplingParams(temperature=heat, banned_token_ids=ids, seed=3),
        )
        for heat, ids in ((1.0, []), (0.7, banned))
    ]
    greedy = [
        generation(
            prompt,
            max_new_tokens=8,
            logprobs=True,
            sampling=inference_pb2.SamplingParams(temperature=heat),
        )
        for (prompt, _), heat in zip(cold, (0.0, 1e-4, 1e-12), strict=True)
    ]
    answers = await rig.run(greedy[0], hot[0], greedy[1], hot[1], greedy[2])
    for (_, tokens), answer in zip(cold, answers[::2], strict=True):
        assert_samples(answer, tokens, n=1)
    (few,) = generated(answers[3]).tokens.values()
    assert len(few) == 8 and not set(few) & set(banned)
    assert generated(answers[1]).tokens == (await rig.generate(hot[0])).tokens
    for answer in answers:
        assert np.isfinite(generated(answer).logprobs[0]).all()


@pytest.mark.parametrize("budget", [16, 512])
async def test_b31_every_reply_of_a_mixed_batch_equals_its_solo_run(
    models: RandomModels, make_rig: MakeRig, rng: Rng, budget: int
) -> None:
    model = models.lm("Qwen2")
    prefix = random_tokens(rng, 33)
    sampled = inference_pb2.SamplingParams(
        temperature=1.0, top_p=0.9, seed=7, logit_bias={5: 2.0, 9: -100.0}
    )
    items = [random_tokens(rng, length) for length in (2, 9)]
    requests: list[Request] = [
        ScoreCase(contexts=[prefix], items=items, labels=[[0], [2]]).request,
        generation(prefix, max_new_tokens=10, sampling=sampled, n=3, top_logprobs=4),
        ScoreCase(contexts=[prefix[:20]], items=items, labels=[[1], [2], [3]]).request,
        ScoreCase(contexts=[prefix], items=items).request,
        generation(prefix[:16], max_new_tokens=10),
        generation([3], max_new_tokens=7, sampling=inference_pb2.SamplingParams(seed=1)),
    ]
    alone = [
        (await make_rig(model, max_step_tokens=budget).run(request))[0] for request in requests
    ]
    rig = make_rig(model, max_step_tokens=budget)
    for found, expected in zip(await rig.run(*requests), alone, strict=True):
        if isinstance(expected, Generated):
            found = generated(found)
            assert found.tokens == expected.tokens
            assert found.finish == expected.finish
            for sample, values in expected.logprobs.items():
                assert found.logprobs[sample] == pytest.approx(values, abs=1e-5)
                assert [list(top) for top in found.top[sample]] == [
                    list(top) for top in expected.top[sample]
                ]
        else:
            assert isinstance(found, inference_pb2.ScoreResponse), found
            assert isinstance(expected, inference_pb2.ScoreResponse)
            assert found.scores == pytest.approx(expected.scores, abs=TOLERANCE)
            assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
            assert found.label_mass == pytest.approx(expected.label_mass, abs=1e-5)


async def test_b34_the_models_context_is_the_limit_and_not_one_token_less(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    model = models.lm("Llama", context_tokens=64)
    rig = make_rig(model)
    sequence = random_tokens(rng, 65)
    for length in (63, 64):
        case = ScoreCase(contexts=[sequence[:40]], items=[sequence[40:length]])
        labelled = replace(case, labels=[[1], [2]])
        for fits in (case, labelled):
            fits.assert_right(model.oracle, await rig.score(fits.request))
    for prompt, asked, got in ((63, 1, 1), (60, 10, 4), (1, 100, 63)):
        tokens = model.oracle.greedy(sequence[:prompt], got)
        answer = await rig.generate(generation(sequence[:prompt], max_new_tokens=asked))
        if tokens is not None:
            assert_samples(answer, tokens, n=1)
        assert len(answer.tokens[0]) == got
    over, full, nothing = await rig.run(
        ScoreCase(contexts=[sequence[:40]], items=[sequence[40:]]).request,
        generation(sequence[:64], max_new_tokens=1),
        generation(sequence[:10], max_new_tokens=0),
    )
    assert "65" in refusal(over) and "64" in refusal(over)
    assert "64" in refusal(full)
    assert "at least 1" in refusal(nothing)


async def test_b36_samples_differ_and_repeat_by_their_seed_in_any_batch(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    model = models.lm("Mistral")
    prompt = random_tokens(rng, 19)
    other = generation(random_tokens(rng, 30), max_new_tokens=30, n=2)

    def request(seed: int | None = None) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(temperature=2.0, seed=seed)
        return generation(prompt, max_new_tokens=20, n=4, sampling=sampling)

    rig = make_rig(model, max_step_tokens=16)
    seven = generated((await rig.run(request(seed=7)))[0]).tokens
    answers = await rig.run(
        other, request(seed=7), request(), request(), request(seed=0), request(seed=0)
    )
    again, absent, absent_too, zero, zero_too = (generated(each).tokens for each in answers[1:])
    assert len(set(map(tuple, seven.values()))) == 4
    assert again == seven
    assert absent != absent_too
    assert zero == zero_too != seven
    ends = {
        sample: tokens.index(seven[0][1])
        for sample, tokens in seven.items()
        if seven[0][1] in tokens
    }
    stopping = request(seed=7)
    stopping.stop_token_ids.append(seven[0][1])
    stopped = await rig.generate(stopping)
    assert stopped.tokens == {
        sample: tokens[: ends.get(sample, 20) + 1] for sample, tokens in seven.items()
    }
    assert len(stopped.finish) == 4


async def test_b45_what_can_never_fit_is_refused_at_once_and_blocks_nobody(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    model = models.lm("Llama", kv_pages=50)
    rig = make_rig(model)
    prompt, tokens = prompt_and_tokens(rng, model.oracle, VOCAB, length=10, count=5)
    long, many, small = await rig.run(
        generation(random_tokens(rng, 1000), max_new_tokens=10),
        generation(random_tokens(rng, 16), n=8, max_new_tokens=200),
        generation(prompt, max_new_tokens=5),
    )
    assert isinstance(long, NeverFits) and isinstance(many, NeverFits)
    assert "50" in str(long)
    assert_samples(small, tokens, n=1)


async def test_b37_generated_logprobs_are_before_temperature_and_truncation(
    models: RandomModels, make_rig: MakeRig
) -> None:
    rig = make_rig(models.bigram([[2.0, 1.0, 0.0, -1.0]] * 4))
    sampling = inference_pb2.SamplingParams(temperature=0.5, top_p=0.7)
    answer = await rig.generate(generation([1], sampling=sampling, max_new_tokens=3, logprobs=True))
    assert answer.tokens == {0: [0, 0, 0]}
    assert answer.logprobs[0] == pytest.approx([-0.4402] * 3, abs=1e-4)
