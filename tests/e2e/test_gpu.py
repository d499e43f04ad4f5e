"""The engine on a GPU against transformers on the CPU: strategies in float32, and halves."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.e2e.generate_cases import assert_samples, generation, prompt_and_tokens
from tests.e2e.random_models import FAMILIES, VOCAB, MakeRig, RandomModels, random_tokens
from tests.e2e.score_cases import ScoreCase

from stemserve.proto.v1 import inference_pb2

pytestmark = pytest.mark.gpu

KERNELS = tuple(inference_pb2.Kernel.values())  # the first lets the cost model choose


@pytest.fixture(scope="module")
def gpu_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory, device="cuda")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_each_strategy_answers_as_transformers_does(
    gpu_models: RandomModels,
    make_rig: MakeRig,
    seed: int,
    family: str,
    kernel: inference_pb2.Kernel.ValueType,
) -> None:
    rng = np.random.default_rng(seed)
    model = gpu_models.lm(family)
    rig = make_rig(model, max_step_tokens=64)
    cases = [
        ScoreCase(
            contexts=[random_tokens(rng, length)],
            items=[random_tokens(rng, count) for count in (1, 7, 45)],
            labels=[[3], [4, 5]] if length % 2 else [],
            kernel=kernel,
        )
        for length in (1, 15, 16, 33)
    ]
    prompts = [prompt_and_tokens(rng, model.oracle, VOCAB, length=n, count=18) for n in (16, 33)]
    for _ in range(2):
        requests = [
            generation(prompt, max_new_tokens=18, n=3, kernel=kernel) for prompt, _ in prompts
        ]
        answers = await rig.run(*requests, *(case.request for case in cases))
        for (_, tokens), answer in zip(prompts, answers[:2], strict=True):
            assert_samples(answer, tokens, n=3)
        for case, answer in zip(cases, answers[2:], strict=True):
            case.assert_right(model.oracle, answer)
    if kernel:
        taken = [group for group in rig.groups if group.kernel == kernel]
        in_graphs = [group for group in taken if group.reason == "graph"]
        assert {group.reason for group in taken} - {"graph"} == {"forced"}
        # Captured decode steps run the tree kernel, so only a caller who names that one gets them.
        assert not in_graphs or kernel == inference_pb2.KERNEL_CODEC


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_scores_in_halves_lose_no_more_than_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    make_rig: MakeRig,
    seed: int,
    family: str,
    dtype: str,
) -> None:
    rng = np.random.default_rng(seed)
    model = RandomModels(tmp_path_factory, device="cuda", dtype=dtype).lm(family)
    lossy = model.oracle.in_type(getattr(torch, dtype))
    case = ScoreCase(
        contexts=[random_tokens(rng, 100)], items=[random_tokens(rng, 20) for _ in range(16)]
    )
    rig = make_rig(model)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(2):  # the second time with a cached context
        answer = await rig.score(case.request)
        for item, (start, end) in zip(
            case.items, pairwise(answer.token_logprob_offsets), strict=True
        ):
            exact = model.oracle.token_logprobs(case.contexts[0], item)
            ours += np.abs(answer.token_logprobs[start:end] - exact).tolist()
            theirs += np.abs(lossy.token_logprobs(case.contexts[0], item) - exact).tolist()
    assert np.mean(ours) <= 1.25 * np.mean(theirs)
    assert np.max(ours) <= 2 * np.max(theirs)
