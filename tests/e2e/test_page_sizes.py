"""Pages of other sizes than 16 on a CPU: what calls get does not depend on it."""

from itertools import cycle, islice

import numpy as np
import pytest
from tests.e2e.engine_rig import Generated
from tests.e2e.generate_cases import assert_samples, generation, prompt_and_tokens
from tests.e2e.random_models import VOCAB, MakeRig, RandomModel, RandomModels, random_tokens
from tests.e2e.score_cases import TOLERANCE, ScoreCase, blob

from stemserve.proto.v1 import inference_pb2

CACHE_TOKENS = 9_000


@pytest.fixture(scope="module", params=[1, 7, 100])
def models(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[RandomModel, RandomModel]:
    """Of pages of that size, and of 16; with the same weights."""
    sizes: tuple[int, int] = (request.param, 16)
    made: list[RandomModel] = []
    for size in sizes:
        flags = ["--page-size", str(size), "--max-burst-steps", "4"]
        models = RandomModels(tmp_path_factory, flags=flags)
        made.append(models.lm("Qwen3", kv_pages=CACHE_TOKENS // size))
        assert made[-1].worker.facts.page_size == size
    return made[0], made[1]


async def test_scores_are_those_of_transformers_with_every_kernel(
    models: tuple[RandomModel, RandomModel], make_rig: MakeRig, rng: np.random.Generator
) -> None:
    model, _ = models
    trunk = random_tokens(rng, 120)
    contexts = [trunk[:length] for length in (120, 35, 32, 1)]
    items = [random_tokens(rng, length) for length in (1, 6, 7, 8, 40, 3, 101, 2)]
    case = ScoreCase(
        contexts=contexts, items=items, item_context=list(islice(cycle(range(4)), len(items)))
    )
    rig = make_rig(model, max_step_tokens=64)
    kernels = inference_pb2.Kernel.values()
    for kernel in (*kernels, *kernels[:1]):  # the last one finds its contexts in the cache
        case.forced(kernel).assert_right(model.oracle, await rig.score(case.forced(kernel).request))


async def test_samples_are_transformers_and_beams_those_of_pages_of_16(
    models: tuple[RandomModel, RandomModel], make_rig: MakeRig, rng: np.random.Generator
) -> None:
    oracle = models[0].oracle
    prompt, tokens = prompt_and_tokens(rng, oracle, VOCAB, length=45, count=30)
    samples = generation(prompt, max_new_tokens=30, n=3)
    beams = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(tokens=blob(prompt[:40])), max_new_tokens=8, n=2
    )
    beams.beam_search.width = 4
    scores: list[dict[int, float]] = []
    for model in models:
        sampled, best = await make_rig(model).run(samples, beams)
        assert_samples(sampled, tokens, n=3)
        assert isinstance(best, Generated), best
        scores.append(best.scores)
    assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)
    assert len(scores[0]) == 2
