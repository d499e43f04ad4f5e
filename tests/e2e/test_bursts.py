"""Calls whose decode steps go to the worker in bursts get what single steps give."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e import engine_rig
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.generate_cases import generation
from tests.e2e.in_process_engine import InProcessWorker, start_worker
from tests.e2e.random_models import FAMILIES, RandomModels, random_tokens
from tests.service.serving import byte_tokenizer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.batching.batcher import BatcherLimits
from stemserve.service.text.tokenizer import Tokenizer
from stemserve.service.text.tokenizer_files import load_tokenizer

TOLERANCE = 1e-5  # rows in other company round otherwise


@pytest.fixture(scope="module")
def bursting(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory, flags=["--max-burst-steps", "8"])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, bursts are as long as the worker lets them be."""
    monkeypatch.setattr(engine_rig, "BatcherLimits", partial(BatcherLimits, max_burst_s=60.0))


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    yield replace(byte_tokenizer(), eos_ids=frozenset())


async def answers(
    worker: InProcessWorker,
    tokenizer: Tokenizer,
    burst: int,
    requests: list[inference_pb2.GenerateRequest],
) -> tuple[list[Generated], set[int]]:
    """Answers, and the lengths of the bursts."""
    limited = replace(worker, facts=replace(worker.facts, max_burst_steps=burst))
    rig = EngineRig(limited, tokenizer)
    await rig.generate(generation([1, 2, 3], max_new_tokens=8))  # so that its speed is known
    rig.engine.plans.clear()
    found = await rig.run(*requests)
    rig.close()
    generated = [answer for answer in found if isinstance(answer, Generated)]
    assert len(generated) == len(requests), found
    return generated, {max(1, plan.repeat) for plan in rig.engine.plans}


def assert_same(found: Generated, wanted: Generated) -> None:
    assert found.tokens == wanted.tokens
    assert (found.text, found.finish) == (wanted.text, wanted.finish)
    for sample, logprobs in wanted.logprobs.items():
        assert found.logprobs[sample] == pytest.approx(logprobs, abs=TOLERANCE)
        for some, others in zip(found.top[sample], wanted.top[sample], strict=True):
            assert some == pytest.approx(others, abs=TOLERANCE)
    assert found.usage.output_tokens == wanted.usage.output_tokens
    assert found.usage.prompt_tokens == wanted.usage.prompt_tokens


def sampling(seed: int, **options: Any) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(temperature=1.0, seed=seed, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("burst", [4, 8])
async def test_calls_of_all_kinds_get_what_single_steps_give(
    bursting: RandomModels, tokenizer: Tokenizer, family: str, burst: int, rng: np.random.Generator
) -> None:
    worker = bursting.lm(family).worker
    trunk = random_tokens(rng, 39)
    requests = [
        generation(trunk, max_new_tokens=29, logprobs=True),
        generation([*trunk, 7], max_new_tokens=22, n=4, sampling=sampling(5), logprobs=True),
        generation(
            trunk[:16], max_new_tokens=31, n=2, sampling=sampling(6, top_p=0.9), top_logprobs=3
        ),
        generation(
            random_tokens(rng, 9),
            max_new_tokens=40,
            sampling=sampling(7),
            min_new_tokens=20,
            stop_token_ids=list(range(0, 250, 3)),
        ),
        generation(
            random_tokens(rng, 9),
            max_new_tokens=40,
            sampling=sampling(8),
            n=3,
            stop_token_ids=list(range(0, 250, 13)),
        ),
    ]
    one_by_one, alone = await answers(worker, tokenizer, 1, requests)
    in_bursts, together = await answers(worker, tokenizer, burst, requests)
    assert alone == {1} and max(together) == burst
    for found, wanted in zip(in_bursts, one_by_one, strict=True):
        assert_same(found, wanted)


async def test_a_search_runs_in_no_burst_nor_does_what_is_beside_it(
    bursting: RandomModels, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    worker = bursting.lm("Llama").worker
    search = generation(random_tokens(rng, 20), max_new_tokens=20, n=3)
    search.ClearField("sampling")
    search.beam_search.width = 3
    beside = generation(random_tokens(rng, 9), max_new_tokens=60)
    one_by_one, alone = await answers(worker, tokenizer, 1, [search, beside])
    together, lengths = await answers(worker, tokenizer, 8, [search, beside])
    assert alone == {1} and max(lengths) == 8  # once the search has ended
    for found, wanted in zip(together, one_by_one, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("seed", range(6))
async def test_a_stop_string_inside_a_burst_ends_its_sample_there(
    bursting: RandomModels, tokenizer: Tokenizer, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    worker, prompt = bursting.lm("Llama").worker, random_tokens(rng, 20)
    free = generation(prompt, max_new_tokens=40, n=2, sampling=sampling(seed), logprobs=True)
    (whole,), _ = await answers(worker, tokenizer, 1, [free])
    start = int(rng.integers(5, len(whole.text[0]) - 5))
    free.stop.append(whole.text[0][start : start + 1 + seed % 3])
    (wanted,), _ = await answers(worker, tokenizer, 1, [free])
    (found,), together = await answers(worker, tokenizer, 8, [free])
    assert max(together) == 8 and wanted.finish[0] == inference_pb2.FINISH_REASON_STOP
    assert len(wanted.tokens[0]) < 40
    assert_same(found, wanted)


async def test_the_default_model_generates_in_bursts_what_it_generates_step_by_step(
    default_model_path: Path,
) -> None:
    worker = start_worker(default_model_path, kv_pages=200, flags=["--max-burst-steps", "4"])
    tokenizer = load_tokenizer(default_model_path)
    prompt = tokenizer.encode_continuations(["The capital of France is"])[0].tolist()
    requests = [
        generation(prompt, max_new_tokens=18, logprobs=True),
        generation(prompt, max_new_tokens=15, n=3, sampling=sampling(3, top_p=0.95)),
        generation(prompt[:2], max_new_tokens=24, stop=[".", " the "], ignore_eos=False),
    ]
    one_by_one, alone = await answers(worker, tokenizer, 1, requests)
    in_bursts, together = await answers(worker, tokenizer, 4, requests)
    assert alone == {1} and max(together) == 4
    for found, wanted in zip(in_bursts, one_by_one, strict=True):
        assert_same(found, wanted)
