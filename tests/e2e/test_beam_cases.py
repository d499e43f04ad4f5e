"""Beam searches that are short of pages, cancelled, late or failing, and what they refuse."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.generate_cases import generation
from tests.e2e.random_models import MakeRig, RandomModel, RandomModels, random_tokens
from tests.e2e.test_beams_against_transformers import Search, assert_found

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import DeadlinePassed, InvalidRequest, NeverFits
from stemserve.service.request import BeamSpec, EarlyStopping, GenerateJob, JobFailed

HEURISTIC = inference_pb2.EARLY_STOPPING_HEURISTIC
FEW_PAGES = 18
LOGITS = np.log([[0.4, 0.3, 0.3], [0.05, 0.05, 0.9], [0.6, 0.4, 1e-9]]).tolist()


def search(
    rng: np.random.Generator, length: int, *, width: int = 4, best: int = 4, new_tokens: int = 40
) -> Search:
    return Search(
        prompt=random_tokens(rng, length),
        width=width,
        best=best,
        penalty=1.0,
        mode=HEURISTIC,
        new_tokens=new_tokens,
    )


def job(prompt: list[int], *, deadline: float | None = None) -> GenerateJob:
    beams = BeamSpec(
        width=5, best=2, length_penalty=1.0, early_stopping=EarlyStopping.NEVER, min_new_tokens=0
    )
    return GenerateJob(
        request_id="search",
        prompt=np.array(prompt, np.int32),
        samplers=(),
        max_new_tokens=60,
        stop_ids=frozenset(),
        deadline=deadline,
        beams=beams,
    )


async def test_b39_end_tokens_count(models: RandomModels, make_rig: MakeRig) -> None:
    model = models.bigram(LOGITS)
    rig = make_rig(model, eos_ids=frozenset({2}))
    request = generation([2], max_new_tokens=2, n=2, ignore_eos=False)
    request.ClearField("sampling")
    request.beam_search.width = 2
    answer = await rig.generate(request)
    assert answer.tokens == {0: [1, 2], 1: [0, 0]}
    np.testing.assert_allclose([answer.scores[0], answer.scores[1]], [-0.5108, -0.7136], atol=1e-4)


@pytest.mark.parametrize("kv_pages", [FEW_PAGES, 700])
async def test_searches_that_share_few_pages_find_what_they_find_alone(
    models: RandomModels, make_rig: MakeRig, seed: int, kv_pages: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.lm("Llama", kv_pages=kv_pages)
    rig = make_rig(model, max_step_tokens=64)
    searches = [search(rng, length) for length in (33, 17, 16)]
    prompt = random_tokens(rng, 40)
    sampled = generation(prompt, n=2, max_new_tokens=30)
    alone = [await rig.generate(each.request) for each in searches]
    beside = await rig.generate(sampled)
    *together, drawn = await rig.run(*(each.request for each in searches), sampled)
    for each, before, after in zip(searches, alone, together, strict=True):
        assert isinstance(after, Generated), after
        assert after.tokens == before.tokens
        np.testing.assert_allclose(list(after.scores.values()), list(before.scores.values()), 1e-4)
        assert after.usage.output_tokens == each.best * each.new_tokens
    assert isinstance(drawn, Generated) and drawn.tokens == beside.tokens


async def test_beams_share_full_pages_and_copy_only_a_part_of_one(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rig = make_rig(models.lm("Qwen3"))
    each = search(rng, 100, width=8, best=8)
    answer = await rig.generate(each.request)
    assert answer.finish.keys() == set(range(8))
    longest = -(-(100 + 39) // 16)
    for plan in rig.engine.plans[1:]:
        assert len(unpack_int32(plan.token_ids)) == 8 and plan.repeat <= 1
        assert len(unpack_int32(plan.node_pages)) <= 6 + 8 * (longest - 6)
        copies = unpack_int32(plan.copies).reshape(-1, 3)
        assert len(copies) <= 8 and (copies[:, 2] < 16).all()
    pages = rig.batcher.load()
    assert pages.used_pages == 0 and pages.cached_pages == 7  # the prompt


@pytest.mark.parametrize("turns", range(0, 12, 2))
def test_a_search_that_is_cancelled_leaves_nothing(
    models: RandomModels, make_rig: MakeRig, seed: int, turns: int
) -> None:
    rig = make_rig(models.lm("Llama"))
    rig.batcher.submit(job(random_tokens(np.random.default_rng(seed), 20)))
    for _ in range(turns):
        rig.engine.turn()
    rig.batcher.cancel("search")
    drain(rig)


def test_a_search_has_work_whenever_no_step_of_it_is_in_flight(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rig = make_rig(models.lm("Llama"), max_step_tokens=16)  # the prompt takes two steps
    rig.batcher.submit(job(random_tokens(np.random.default_rng(seed), 20)))
    steps = 0
    while rig.batcher.has_work:
        plan = rig.batcher.plan_step()
        assert plan is not None
        assert rig.batcher.has_work == (steps == 0)
        rig.batcher.apply(rig.engine._runner.step(plan))  # pyright: ignore[reportPrivateUsage]
        steps += 1
    assert steps == 2 + 59
    drain(rig)


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_a_search_in_a_step_that_fails_fails_and_leaves_nothing(
    models: RandomModels, make_rig: MakeRig, seed: int, turns: int
) -> None:
    rig = make_rig(models.lm("Llama"))
    rig.batcher.submit(job(random_tokens(np.random.default_rng(seed), 20)))
    for _ in range(turns):
        plan = rig.batcher.plan_step()
        assert plan is not None
        rig.batcher.apply(rig.engine._runner.step(plan))  # pyright: ignore[reportPrivateUsage]
    plan = rig.batcher.plan_step()
    assert plan is not None
    failed = worker_pb2.StepResult(step_id=plan.step_id, error="out of luck")
    (event,) = rig.batcher.apply(failed)
    assert isinstance(event, JobFailed) and "out of luck" in str(event.error)
    drain(rig)


def test_a_search_that_is_late_fails_and_leaves_nothing(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rig = make_rig(models.lm("Llama"))
    due = time.monotonic() + 0.2
    rig.batcher.submit(job(random_tokens(np.random.default_rng(seed), 20), deadline=due))
    for _ in range(3):
        plan = rig.batcher.plan_step()
        if plan is not None:
            rig.batcher.apply(rig.engine._runner.step(plan))  # pyright: ignore[reportPrivateUsage]
    time.sleep(max(0.0, due - time.monotonic()))
    (event,) = rig.batcher.expire()
    assert isinstance(event, JobFailed) and isinstance(event.error, DeadlinePassed)
    drain(rig)


async def test_a_search_that_could_never_fit_is_refused(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rig = make_rig(models.lm("Llama", kv_pages=FEW_PAGES))
    wide = search(np.random.default_rng(seed), 16, width=8, best=1, new_tokens=100)
    (answer,) = await rig.run(wide.request)
    assert isinstance(answer, NeverFits)


async def test_the_kernel_of_a_search_can_be_forced(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    model = models.lm("Mistral")
    rig = make_rig(model)
    each = search(np.random.default_rng(seed), 33, new_tokens=18)
    request = each.request
    for kernel in (inference_pb2.KERNEL_CODEC, inference_pb2.KERNEL_CASCADE):
        request.kernel = kernel
        assert_found(await rig.generate(request), each, model.oracle)
        decoded = [group for group in rig.groups if group.phase == "decode"]
        assert (decoded[-1].kernel, decoded[-1].reason) == (kernel, "forced")


def refusals() -> dict[str, Callable[[inference_pb2.GenerateRequest], object]]:
    return {
        "sampling.temperature": lambda r: setattr(r.sampling, "temperature", 0.0),
        "sampling.top_k": lambda r: setattr(r.sampling, "top_k", 2),
        "sampling.seed": lambda r: setattr(r.sampling, "seed", 0),
        "sampling.logit_bias": lambda r: r.sampling.logit_bias.update({1: 1.0}),
        "sampling.banned_token_ids": lambda r: r.sampling.banned_token_ids.append(1),
        "stop": lambda r: r.stop.append("x"),
        "top_logprobs": lambda r: setattr(r, "top_logprobs", 1),
        "n": lambda r: setattr(r, "n", 5),
        "beam_search.width": lambda r: setattr(r.beam_search, "width", 257),
        "beam_search.length_penalty": lambda r: setattr(
            r.beam_search, "length_penalty", float("nan")
        ),
        "beam_search.early_stopping": lambda r: setattr(r.beam_search, "early_stopping", 9),
    }


@pytest.mark.parametrize("field", refusals())
async def test_what_does_not_go_with_a_search_is_refused_by_its_name(
    models: RandomModels, make_rig: MakeRig, seed: int, field: str
) -> None:
    request = search(np.random.default_rng(seed), 5).request
    refusals()[field](request)
    (answer,) = await rig_of(models, make_rig).run(request)
    assert isinstance(answer, InvalidRequest)
    assert answer.field == field


async def test_a_width_of_no_beams_and_too_many_candidates_are_refused(
    models: RandomModels, make_rig: MakeRig, seed: int
) -> None:
    rig, request = rig_of(models, make_rig), search(np.random.default_rng(seed), 5).request
    request.beam_search.width = 0
    (answer,) = await rig.run(request)
    assert isinstance(answer, InvalidRequest) and answer.field == "beam_search.width"


def rig_of(models: RandomModels, make_rig: MakeRig) -> EngineRig:
    model: RandomModel = models.lm("Llama")
    return make_rig(model)


def drain(rig: EngineRig) -> None:
    while rig.engine.turn():
        pass
    rig.batcher.check_idle()
