"""What a Generate request says of sampling reaches the engine: seeds, bias, bans, temperature."""

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine
from tests.service.generating import GREEDY, generated, prompt
from tests.service.serving import Served, fixed_tokens, serving

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.generation.generation import child_seed
from stemserve.service.client import ClientError
from stemserve.service.request import GenerateJob


def sampling_request(seed: int | None) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(prompt=prompt(0), n=4, max_new_tokens=20)
    if seed is not None:
        request.sampling.seed = seed
    return request


async def sampled(served: Served, seed: int | None) -> list[list[int]]:
    _, samples = await generated(served, sampling_request(seed))
    return [[token for news in samples[s] for token in news.token_ids] for s in range(4)]


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
async def test_b36_a_seed_gives_different_samples_and_the_same_ones_again(seed: int) -> None:
    engine = BigramEngine(np.full((1000, 1000), 0.001))
    async with serving(engine, fixed_tokens(*[b"a"] * 1000)) as served:
        first, second = await sampled(served, seed), await sampled(served, seed)
        assert first == second
        assert len({tuple(tokens) for tokens in first}) == 4


async def test_b36_without_a_seed_each_call_differs() -> None:
    engine = BigramEngine(np.full((1000, 1000), 0.001))
    async with serving(engine, fixed_tokens(*[b"a"] * 1000)) as served:
        assert await sampled(served, None) != await sampled(served, None)


def test_child_seeds_are_distinct_words() -> None:
    seeds = {child_seed(seed, sample) for seed in range(50) for sample in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_bias_and_bans_reach_the_sampler() -> None:
    engine = BigramEngine()
    async with serving(engine, fixed_tokens(b"a", b"b", b"c", eos_id=2)) as served:
        request = inference_pb2.GenerateRequest(
            prompt=prompt(0), sampling=GREEDY, max_new_tokens=1, stop_token_ids=[1]
        )
        request.sampling.logit_bias[1] = -100.0
        request.sampling.banned_token_ids.extend([2, 2])
        await generated(served, request)
        (job,) = engine.jobs
        assert isinstance(job, GenerateJob)
        assert job.samplers[0].bias_ids.tolist() == [1]
        assert job.samplers[0].bias_values.tolist() == [-100.0]
        assert job.samplers[0].banned_ids.tolist() == [2]
        assert job.stop_ids == {1, 2}


async def test_allowed_tokens_reach_the_sampler_without_banned_ones() -> None:
    engine = BigramEngine()
    async with serving(engine, fixed_tokens(b"a", b"b", b"c", b"d")) as served:
        request = inference_pb2.GenerateRequest(prompt=prompt(0), sampling=GREEDY)
        await generated(served, request)
        request.sampling.allowed_token_ids.extend([2, 1, 2])
        request.sampling.banned_token_ids.append(1)
        await generated(served, request)
        jobs = [job for job in engine.jobs if isinstance(job, GenerateJob)]
        assert [job.samplers[0].allowed_ids.tolist() for job in jobs] == [[], [2]]


@pytest.mark.parametrize(
    ("allowed", "banned", "min_new_tokens", "field"),
    [
        ([1, 0], [0, 1], 0, "sampling.allowed_token_ids"),
        ([2], [], 1, "min_new_tokens"),
        ([0, 2], [0], 1, "min_new_tokens"),
        ([0, 2], [0], 0, None),
        ([0, 2], [], 1, None),
    ],
)
async def test_allowed_tokens_of_which_none_can_come_are_refused(
    allowed: list[int], banned: list[int], min_new_tokens: int, field: str | None
) -> None:
    async with serving(BigramEngine(), fixed_tokens(b"a", b"b", b"c", eos_id=2)) as served:
        request = inference_pb2.GenerateRequest(prompt=prompt(0), min_new_tokens=min_new_tokens)
        request.sampling.allowed_token_ids.extend(allowed)
        request.sampling.banned_token_ids.extend(banned)
        if field is None:
            await generated(served, request)
            return
        with pytest.raises(ClientError, match="leaves no token") as refusal:
            await generated(served, request)
        assert list(refusal.value.violations) == [field]


async def test_penalties_reach_the_sampler_and_are_off_by_default() -> None:
    engine = BigramEngine()
    async with serving(engine, fixed_tokens(b"a", b"b", b"c")) as served:
        request = inference_pb2.GenerateRequest(prompt=prompt(0), sampling=GREEDY, n=2)
        await generated(served, request)
        request.sampling.repetition_penalty = 1.5
        request.sampling.presence_penalty = -0.5
        request.sampling.frequency_penalty = 0.25
        await generated(served, request)
        specs = [job.samplers for job in engine.jobs if isinstance(job, GenerateJob)]
        found = [
            (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty)
            for samplers in specs
            for spec in samplers
        ]
        assert found == [(1.0, 0.0, 0.0)] * 2 + [(1.5, -0.5, 0.25)] * 2
        assert [s.counts_tokens for samplers in specs for s in samplers] == [False] * 2 + [True] * 2


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_minimum_that_leaves_no_token_to_draw_is_an_invalid_argument(
    ignore_eos: bool,
) -> None:
    async with serving(BigramEngine(), fixed_tokens(b"a", b"b", b"c", eos_id=2)) as served:
        request = inference_pb2.GenerateRequest(
            prompt=prompt(0),
            min_new_tokens=1,
            stop_token_ids=[2, 1] if ignore_eos else [1],
            ignore_eos=ignore_eos,
        )
        await generated(served, request)
        request.sampling.banned_token_ids.append(0)
        with pytest.raises(ClientError, match="min_new_tokens: leaves no token") as refusal:
            await generated(served, request)
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        request.min_new_tokens = 0
        await generated(served, request)


async def test_an_absent_temperature_is_one_and_zero_is_zero() -> None:
    engine = BigramEngine()
    async with serving(engine, fixed_tokens(b"a", b"b", b"c")) as served:
        await generated(served, inference_pb2.GenerateRequest(prompt=prompt(0)))
        await generated(served, inference_pb2.GenerateRequest(prompt=prompt(0), sampling=GREEDY))
        temperatures = [
            job.samplers[0].temperature for job in engine.jobs if isinstance(job, GenerateJob)
        ]
        assert temperatures == [1.0, 0.0]


async def test_a_call_says_how_far_it_guesses_ahead_or_leaves_it_to_the_server() -> None:
    engine = BigramEngine()
    async with serving(engine, fixed_tokens(b"a", b"b", b"c")) as served:
        for draft_tokens in (None, 0, 8):
            request = inference_pb2.GenerateRequest(prompt=prompt(0), draft_tokens=draft_tokens)
            await generated(served, request)
        found = [job.draft_tokens for job in engine.jobs if isinstance(job, GenerateJob)]
        assert found == [None, 0, 8]
