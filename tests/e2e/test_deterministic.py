"""With --deterministic an answer is the same, bit for bit, whatever else a server does."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.generate_cases import generation
from tests.e2e.random_models import MakeRig, RandomModel, RandomModels, random_tokens
from tests.e2e.score_cases import ScoreCase
from tests.e2e.served import generate_to_the_end

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
SAMPLED = inference_pb2.SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5)
SHORT_STEPS = 37  # rows; all longer contexts and calls run in chunks


@pytest.fixture(scope="module")
def fixed_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory, flags=["--deterministic", "--max-burst-steps", "4"])


@pytest.fixture(params=["Llama", "Qwen3"])
def model(fixed_models: RandomModels, request: pytest.FixtureRequest) -> RandomModel:
    return fixed_models.lm(request.param, kv_pages=90)


@pytest.fixture
def rig(make_rig: MakeRig, model: RandomModel) -> Iterator[EngineRig]:
    yield make_rig(model)


def random_case(rng: np.random.Generator, *, labels: bool = False) -> ScoreCase:
    context = random_tokens(rng, int(rng.integers(200, 330)))
    lengths = [1, 16, 33, *rng.integers(1, 60, 4).tolist()]
    return ScoreCase(
        contexts=[context],
        items=[random_tokens(rng, length) for length in lengths],
        labels=[[5], [6, 7], [6, 8, 9]] if labels else (),
    )


def bits(answer: object, order: Sequence[int] | None = None) -> list[bytes]:
    """The scores of each item, with its tokens' log-probabilities where there are any."""
    assert isinstance(answer, inference_pb2.ScoreResponse), answer
    assert not answer.errors
    scores = np.array(answer.scores, np.float64).reshape(answer.shape[0], -1)
    offsets = list(answer.token_logprob_offsets) or [0] * (len(scores) + 1)
    values = np.array(answer.token_logprobs, np.float64)
    items = [
        row.tobytes() + values[offsets[i] : offsets[i + 1]].tobytes()
        for i, row in enumerate(scores)
    ]
    return items if order is None else [items[i] for i in order]


@pytest.mark.parametrize("labels", [False, True], ids=["likelihoods", "labels"])
async def test_scores_do_not_depend_on_neighbours_or_on_what_is_cached(
    rig: EngineRig, rng: np.random.Generator, labels: bool
) -> None:
    case = random_case(rng, labels=labels)
    cold = await rig.score(case.request)
    warm = await rig.score(case.request)
    assert warm.usage.cached_tokens > 0
    others = [random_case(rng).request for _ in range(2)]
    talk = generation(random_tokens(rng, 100), max_new_tokens=12, n=3)
    beside, *_ = await rig.run(case.request, talk, *others)
    assert bits(warm) == bits(cold)
    assert bits(beside) == bits(cold)


async def test_scores_do_not_depend_on_the_order_of_items_or_on_their_number(
    rig: EngineRig, rng: np.random.Generator
) -> None:
    case = random_case(rng)
    expected = bits(await rig.score(case.request))
    order: list[int] = rng.permutation(len(case.items)).tolist()
    shuffled = ScoreCase(contexts=case.contexts, items=[case.items[i] for i in order])
    assert bits(await rig.score(shuffled.request), np.argsort(order).tolist()) == expected
    for item, alone in zip(case.items, expected, strict=True):
        single = ScoreCase(contexts=case.contexts, items=[item])
        assert bits(await rig.score(single.request)) == [alone]


async def test_scores_do_not_depend_on_the_length_of_a_step(
    make_rig: MakeRig, rig: EngineRig, model: RandomModel, rng: np.random.Generator
) -> None:
    """Some items are longer than a short step, and are stored for the call's time."""
    case = random_case(rng)
    expected = bits(await rig.score(case.request))
    short = make_rig(model, max_step_tokens=SHORT_STEPS)
    assert bits(await short.score(case.request)) == expected
    assert len(short.engine.plans) > len(rig.engine.plans)


async def test_scores_do_not_depend_on_which_part_of_a_context_is_cached(
    rig: EngineRig, rng: np.random.Generator
) -> None:
    case = random_case(rng)
    expected = bits(await rig.score(case.request))
    for cached in (0, 16, 33, 150):
        # A context that needs all pages but a few.
        await rig.score(ScoreCase(contexts=[random_tokens(rng, 1400)], items=[[1]]).request)
        fork = [*case.contexts[0][:cached], *random_tokens(rng, 40)]
        await rig.score(ScoreCase(contexts=[fork], items=[[2, 3]]).request)
        partly = await rig.score(case.request)
        assert bits(partly) == expected
        assert cached - 16 < partly.usage.cached_tokens < len(case.contexts[0]) - 40


async def test_an_item_has_the_bits_of_the_same_tokens_in_a_context(
    rig: EngineRig, rng: np.random.Generator
) -> None:
    """Whether keys and values are an item's own, stored, or a generation's makes no difference."""
    tokens = random_tokens(rng, 150)
    last = bits(await rig.score(ScoreCase(contexts=[tokens[:-1]], items=[tokens[-1:]]).request))
    whole = await rig.score(ScoreCase(contexts=[tokens[:61]], items=[tokens[61:]]).request)
    assert np.float64(whole.token_logprobs[-1]).tobytes() == last[0][-8:]


@pytest.mark.parametrize("sampling", [inference_pb2.SamplingParams(temperature=0.0), SAMPLED])
async def test_generations_do_not_depend_on_neighbours_or_on_what_is_cached(
    rig: EngineRig, rng: np.random.Generator, sampling: inference_pb2.SamplingParams
) -> None:
    request = generation(
        random_tokens(rng, 130), max_new_tokens=40, n=2, sampling=sampling, logprobs=True
    )
    alone = await rig.generate(request)
    again = await rig.generate(request)
    assert again.usage.cached_tokens > 0
    score = random_case(rng).request
    talks = [generation(random_tokens(rng, 50), max_new_tokens=30, n=3, sampling=SAMPLED)]
    beside, *_ = await rig.run(request, score, *talks)
    for other in (again, beside):
        assert isinstance(other, Generated)
        assert other.tokens == alone.tokens
        assert other.logprobs == alone.logprobs


async def test_what_was_generated_is_scored_with_the_same_bits(
    rig: EngineRig, rng: np.random.Generator
) -> None:
    """Tokens that decode steps computed, and the same tokens as the rows of an item."""
    prompt = random_tokens(rng, 90)
    found = await rig.generate(generation(prompt, max_new_tokens=50, logprobs=True))
    case = ScoreCase(contexts=[prompt], items=[found.tokens[0]])
    scored = await rig.score(case.request)
    assert list(scored.token_logprobs) == found.logprobs[0]


async def test_a_forced_kernel_is_counted_as_a_fallback(
    rig: EngineRig, rng: np.random.Generator
) -> None:
    case = random_case(rng)
    expected = bits(await rig.score(case.request))
    forced = case.forced(inference_pb2.KERNEL_CASCADE)
    assert bits(await rig.score(forced.request)) == expected
    assert rig.groups[-1].reason == "fallback"


def test_the_worker_says_so(model: RandomModel, models: RandomModels) -> None:
    assert model.worker.facts.deterministic
    assert not models.lm("Llama").worker.facts.deterministic


async def test_a_server_of_the_default_model_keeps_its_bits(
    start_server: StartServer, default_model_path: Path
) -> None:
    """Through real processes: first alone and cold, then warm beside others."""
    words = ("--model", default_model_path, "--deterministic", "--threads", 1)
    _, ports = start_server(*words, "--kv-pages", 200, "--max-step-tokens", 61)
    items = [" light", " water and air", " the sun"]
    mode = inference_pb2.LogLikelihood(token_logprobs=True)
    query = "Plants make their food from"
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=120.0) as client:
        assert (await client.model()).deterministic
        cold = await client.score(items, mode, query=query)
        warm, *_ = await asyncio.gather(
            client.score(items, mode, query=query),
            client.score(items[:2], mode, query="Quite another text, which is a bit longer than"),
            generate_to_the_end(client, tokens=8, n=3),
        )
    for first, second in zip(cold.token_logprobs, warm.token_logprobs, strict=True):
        assert np.array_equal(first, second)
    assert np.array_equal(cold.scores, warm.scores)
    assert np.isfinite(cold.scores).all()
    assert warm.usage.cached_tokens > cold.usage.cached_tokens
