"""Scores of small random models equal those of transformers, one sequence at a time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.oracle import Oracle
from tests.e2e.random_models import (
    FAMILIES,
    KV_PAGES,
    VOCAB,
    MakeRig,
    RandomModel,
    RandomModels,
    random_tokens,
)
from tests.e2e.score_cases import TOLERANCE, ScoreCase, blob, packed
from tests.service.serving import byte_tokenizer

from stemserve.proto.v1 import inference_pb2

PREFILL_KERNELS = (
    inference_pb2.KERNEL_NAIVE,
    inference_pb2.KERNEL_SPLIT,
    inference_pb2.KERNEL_RAGGED,
    inference_pb2.KERNEL_CASCADE,
    inference_pb2.KERNEL_MULTI_ITEM,
    inference_pb2.KERNEL_CUSTOM_MASK,
)
ANY_KERNEL = (*PREFILL_KERNELS, inference_pb2.KERNEL_UNSPECIFIED, inference_pb2.KERNEL_CODEC)
FEW_PAGES = 20  # for the longest item of a call, but not for all calls at once
PREFIX_LENGTHS = (1, 15, 16, 17, 33)
Rng = np.random.Generator


def any_kernel(rng: Rng) -> inference_pb2.Kernel.ValueType:
    return ANY_KERNEL[int(rng.integers(len(ANY_KERNEL)))]


def random_labels(rng: Rng) -> list[list[int]]:
    """One or several tokens; some continue another, some share their start."""
    first, second, third = rng.permutation(VOCAB)[:3].tolist()
    labels = [[first], [second, *random_tokens(rng, 2)], [second, third], [third]]
    return labels[: int(rng.integers(1, 5))]


def random_mode(rng: Rng) -> ScoreCase:
    """Everything but contexts and items."""
    case = ScoreCase(contexts=(), items=(), kernel=any_kernel(rng))
    match int(rng.integers(4)):
        case 0:
            return case
        case 1:
            return replace(case, length_normalized=True)
        case 2:
            return replace(case, labels=random_labels(rng))
        case _:
            temperature = float(rng.choice([0.0, 0.5, 3.0]))
            labels = random_labels(rng)
            return replace(case, labels=labels, apply_softmax=True, temperature=temperature)


def random_cases(rng: Rng, oracle: Oracle, budget: int) -> list[ScoreCase]:
    """A call for each prefix length; corners of the item lengths are in one of them each."""
    corners = iter(rng.permutation([1, 2, budget - 1, budget, budget + 1, 200]).tolist())
    cases: list[ScoreCase] = []
    for length in PREFIX_LENGTHS:
        context = random_tokens(rng, length)
        lengths = [next(corners), 1, *rng.integers(1, 40, int(rng.integers(0, 4))).tolist()]
        items = [random_tokens(rng, count) for count in lengths]
        items.append(oracle.greedy(context, 3) or [0])  # most likely, each of them
        order = rng.permutation(len(items)).tolist()
        mode = random_mode(rng)
        cases.append(replace(mode, contexts=[context], items=[items[i] for i in order]))
    forks = [cases[-1].contexts[0], [*cases[-1].contexts[0][:20], 5], random_tokens(rng, 3)]
    items = [random_tokens(rng, int(rng.integers(1, 20))) for _ in range(6)]
    cases.append(
        replace(random_mode(rng), contexts=forks, items=items, item_context=[2, 0, 1, 1, 0, 2])
    )
    return cases


def company(rng: Rng, cases: Sequence[ScoreCase]) -> list[inference_pb2.GenerateRequest]:
    """Generations beside the scores; one continues the context of a score."""
    prompts = [cases[3].contexts[0], random_tokens(rng, 21)]
    return [
        inference_pb2.GenerateRequest(
            prompt=inference_pb2.Context(tokens=blob(prompt)),
            n=2,
            max_new_tokens=9,
            kernel=any_kernel(rng),
        )
        for prompt in prompts
    ]


async def run_right(
    rig: EngineRig, model: RandomModel, *cases: ScoreCase
) -> list[inference_pb2.ScoreResponse]:
    answers = await rig.run(*(case.request for case in cases))
    responses: list[inference_pb2.ScoreResponse] = []
    for case, answer in zip(cases, answers, strict=True):
        case.assert_right(model.oracle, answer)
        assert isinstance(answer, inference_pb2.ScoreResponse)
        responses.append(answer)
    return responses


@pytest.mark.parametrize(
    ("budget", "kv_pages"), [(7, KV_PAGES), (13, KV_PAGES), (64, KV_PAGES), (64, FEW_PAGES)]
)
@pytest.mark.parametrize("family", FAMILIES)
async def test_any_scores_among_other_requests_cold_and_warm(
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
    cases = random_cases(rng, model.oracle, budget)
    others = company(rng, cases)
    for _ in range(2):
        scores = [case.request for case in cases]
        answers = await rig.run(others[0], *scores[:3], others[1], *scores[3:])
        for case, answer in zip(cases, [*answers[1:4], *answers[5:]], strict=True):
            case.assert_right(model.oracle, answer)
        assert all(isinstance(answers[at], Generated) for at in (0, 4))
    assert max(len(plan.token_ids) // 4 for plan in rig.engine.plans) <= budget


@pytest.mark.parametrize("kernel", PREFILL_KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_each_forced_strategy_scores_as_transformers_does(
    models: RandomModels,
    make_rig: MakeRig,
    seed: int,
    family: str,
    kernel: inference_pb2.Kernel.ValueType,
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm(family)
    rig = make_rig(model)
    lengths = iter(rng.permutation([1, 2, 16, 45, 200]).tolist())
    cases: list[ScoreCase] = []
    for number, length in enumerate(PREFIX_LENGTHS):
        items = [random_tokens(rng, next(lengths)), random_tokens(rng, 1), random_tokens(rng, 7)]
        labels = random_labels(rng) if number % 2 else []
        context = random_tokens(rng, length)
        cases.append(ScoreCase(contexts=[context], items=items, labels=labels, kernel=kernel))
    for _ in range(2):
        await run_right(rig, model, *cases)
    assert {(group.kernel, group.reason) for group in rig.groups} == {(kernel, "forced")}


@pytest.mark.parametrize("length", PREFIX_LENGTHS)
async def test_b02_a_warm_call_computes_its_items_and_what_predicts_them(
    models: RandomModels, make_rig: MakeRig, seed: int, length: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Llama")
    rig = make_rig(model)
    context, items = random_tokens(rng, length), [random_tokens(rng, 3), random_tokens(rng, 5)]
    likelihood = ScoreCase(contexts=[context], items=items)
    (cold,) = await run_right(rig, model, likelihood)
    (warm,) = await run_right(rig, model, likelihood)
    (labels,) = await run_right(rig, model, replace(likelihood, labels=[[3], [4]]))
    read = 2 + 4  # nothing is read after the last token of a likelihood
    assert (cold.usage.cached_tokens, cold.usage.computed_tokens) == (0, length + read)
    assert (warm.usage.cached_tokens, warm.usage.computed_tokens) == (length - 1, 1 + read)
    assert (labels.usage.cached_tokens, labels.usage.computed_tokens) == (length, 8)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
async def test_class_scores_equal_those_of_transformers(
    models: RandomModels, make_rig: MakeRig, seed: int, family: str, num_labels: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.classifier(family, num_labels)
    rig = make_rig(model, max_step_tokens=int(rng.choice([7, 13, 64])))
    contexts = [random_tokens(rng, length) for length in PREFIX_LENGTHS]
    items = [random_tokens(rng, length) for length in (1, 3, 40, 200, 1, 8)]
    item_context = [0, 1, 2, 3, 4, 4]
    for kernel in (any_kernel(rng), any_kernel(rng), any_kernel(rng)):
        answer = await rig.score(
            inference_pb2.ScoreRequest(
                contexts=[inference_pb2.Context(tokens=blob(context)) for context in contexts],
                item_tokens=packed(items),
                item_context=item_context,
                classification=inference_pb2.Classification(),
                kernel=kernel,
            )
        )
        sequences = [[*contexts[c], *item] for c, item in zip(item_context, items, strict=True)]
        expected = np.array([model.oracle.logits(sequence) for sequence in sequences])
        found = np.array(answer.scores).reshape(list(answer.shape))
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


async def test_items_without_a_context_are_scored_from_their_second_token(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Qwen3")
    rig = make_rig(model, max_step_tokens=24)
    items = [random_tokens(rng, length) for length in (2, 9, 50)]
    for kernel in (inference_pb2.KERNEL_UNSPECIFIED, *PREFILL_KERNELS):
        case = ScoreCase(contexts=[[]], items=items, kernel=kernel)
        labelled = replace(case, items=[[7], *items], labels=[[1], [2, 3]])
        await run_right(rig, model, case, labelled)


async def test_item_first_scores_the_query_after_each_item(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Mistral")
    rig = make_rig(model)
    query, context = "what?", random_tokens(rng, 17)
    items = [random_tokens(rng, length) for length in (1, 30)]
    request = inference_pb2.ScoreRequest(
        contexts=[inference_pb2.Context(tokens=blob(context))],
        item_tokens=packed(items),
        query=query,
        item_first=True,
        log_likelihood=inference_pb2.LogLikelihood(token_logprobs=True),
    )
    tokens = byte_tokenizer().encode_continuations([query])[0].tolist()
    answer = await rig.score(request)
    expected = [model.oracle.token_logprobs([*context, *item], tokens) for item in items]
    np.testing.assert_allclose(answer.token_logprobs, np.concatenate(expected), atol=TOLERANCE)
