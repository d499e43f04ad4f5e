"""Generations whose drafts are verified get the tokens that they get without."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.token_constraints import OneOf
from tests.service.toy_jobs import (
    expected_tokens,
    generate_job,
    int32,
    likelihood_job,
    random_tokens,
    run_right,
    usage_of,
)
from tests.service.toy_model import VOCAB, state_of

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import EngineFault
from stemserve.service.request import GenerateJob, StopCause


def drafting_rig(draft_tokens: int = 4, **options: Any) -> Rig:
    """Drafts are always verified."""
    policy = DraftPolicy(default_tokens=draft_tokens, least_gain=0)
    rig = make_rig(drafts=policy, pages=options.pop("pages", 120), **options)
    rig.run(generate_job("first", [0], max_new_tokens=8))  # so that its speed is known
    rig.plans.clear()
    return rig


def repeating(name: str, prompt: list[int], **options: Any) -> GenerateJob:
    """It draws two tokens only, so that it repeats itself often."""
    job = generate_job(name, prompt, temperature=1.0, **options)
    ids, values = int32([2, 3]), np.array([12, 11], np.float32)
    return replace(
        job,
        samplers=tuple(replace(spec, bias_ids=ids, bias_values=values) for spec in job.samplers),
    )


def verifying(rig: Rig) -> list[worker_pb2.StepPlan]:
    """Plans that sample a slot at several rows."""
    slots = [unpack_int32(plan.sample_slots).tolist() for plan in rig.plans]
    return [plan for plan, of in zip(rig.plans, slots, strict=True) if len(set(of)) < len(of)]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("draft_tokens", [1, 2, 8])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_the_tokens_are_those_of_one_step_a_token(
    samples: int, draft_tokens: int, in_flight: int
) -> None:
    rig = drafting_rig(draft_tokens, in_flight=in_flight)
    job = repeating("g", random_tokens(draft_tokens, 20), samples=samples, max_new_tokens=50)
    (usage,) = run_right(rig, job)
    assert rig.answers["g"].finish == dict.fromkeys(range(samples), StopCause.LENGTH)
    assert 0 < usage.accepted_tokens < usage.drafted_tokens
    assert len(rig.plans) < 51
    assert verifying(rig)
    rig.batcher.check_idle()


def test_each_accepted_token_saves_a_step() -> None:
    rig = drafting_rig()
    (usage,) = run_right(rig, repeating("g", random_tokens(4, 20), max_new_tokens=60))
    assert len(rig.plans) == 60 - usage.accepted_tokens
    assert rig.answers["g"].num_events == len(rig.plans)


def test_a_step_with_drafts_waits_for_the_one_before() -> None:
    rig = drafting_rig(in_flight=3)
    rig.submit(repeating("g", random_tokens(4, 20), max_new_tokens=60))
    while rig.turn():
        if rig.plans[-1] in verifying(rig):
            assert len(rig.in_flight) <= 1


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_inside_a_draft_drops_what_follows(seed: int) -> None:
    rig = drafting_rig(8)
    free = repeating("g", random_tokens(seed, 30), samples=2, max_new_tokens=40, seed=seed)
    stop = frozenset([2]) if seed % 2 else frozenset([3])
    run_right(rig, replace(free, stop_ids=stop))
    rig.batcher.check_idle()


def test_the_caller_decides() -> None:
    rig = drafting_rig(8)
    job = repeating("g", random_tokens(1, 30), max_new_tokens=40)
    (usage,) = run_right(rig, replace(job, draft_tokens=0))
    assert usage.drafted_tokens == 0 and not verifying(rig)
    rig = drafting_rig(0)
    (usage,) = run_right(rig, replace(job, draft_tokens=3))
    assert usage.drafted_tokens > 0
    assert max(len(unpack_int32(plan.token_ids)) for plan in verifying(rig)) == 1 + 3


def test_a_rejected_token_never_enters_the_cache() -> None:
    """Who continues a generation, at any length, reads what it would have computed itself."""
    rig = drafting_rig(8)
    job = repeating("g", random_tokens(2, 20), samples=2, max_new_tokens=45)
    run_right(rig, job)
    tokens = [*job.prompt.tolist(), *expected_tokens(job)[1]]
    for length in range(21, 65, 4):
        again = generate_job(f"{length}", tokens[:length], max_new_tokens=3)
        (usage,) = run_right(rig, again)
        assert usage.cached_tokens == length - 1
    rig.batcher.check_idle()


def test_drafts_of_many_jobs_are_verified_together() -> None:
    rig = drafting_rig(4, slots=16, pages=300, budget=128)
    jobs = [
        repeating(f"{n}", random_tokens(n, 10 + n), samples=1 + n % 2, max_new_tokens=30 + n)
        for n in range(8)
    ]
    run_right(rig, *jobs)
    most = max(len(np.unique(unpack_int32(plan.sample_slots))) for plan in verifying(rig))
    assert most >= 6
    rig.batcher.check_idle()


def test_drafts_are_cut_where_a_step_has_no_room() -> None:
    rig = drafting_rig(8, budget=5)
    run_right(rig, *(repeating(f"{n}", random_tokens(n, 9), max_new_tokens=30) for n in range(3)))
    assert all(len(unpack_int32(plan.token_ids)) <= 5 for plan in rig.plans)
    assert verifying(rig)
    rig.batcher.check_idle()


def test_drafts_take_no_pages_that_are_not_there() -> None:
    jobs = [repeating(f"{n}", random_tokens(n, 17), samples=2, max_new_tokens=40) for n in range(3)]
    rig = drafting_rig(8, pages=12, slots=6)
    run_right(rig, *jobs)
    assert verifying(rig)
    rig.batcher.check_idle()


def test_a_prompt_that_comes_meanwhile_is_computed_at_once() -> None:
    rig = drafting_rig(4)
    running = repeating("running", random_tokens(1, 20), max_new_tokens=60)
    rig.submit(running)
    while not verifying(rig):
        rig.turn()
    late = likelihood_job("late", [random_tokens(2, 20)], [[1, 2]])
    rig.submit(late)
    before = len(rig.plans)
    while rig.answers["late"].result is None:
        rig.turn()
    assert len(rig.plans) <= before + 3
    while rig.turn():
        pass
    assert rig.answers["running"].tokens == expected_tokens(running)
    rig.batcher.check_idle()


@pytest.mark.parametrize(("presence", "repetition"), [(0.5, 1.0), (0.0, 1.1)])
def test_under_penalties_there_are_no_drafts(presence: float, repetition: float) -> None:
    rig = drafting_rig(8)
    job = repeating("g", random_tokens(1, 20), max_new_tokens=30)
    specs = (
        replace(spec, presence_penalty=presence, repetition_penalty=repetition)
        for spec in job.samplers
    )
    job = replace(job, samplers=tuple(specs))
    (answer,) = rig.run(job)
    assert usage_of(answer).drafted_tokens == 0 and not verifying(rig)


def test_under_a_constraint_there_are_no_drafts() -> None:
    rig = drafting_rig(8)
    job = repeating("g", random_tokens(1, 20), max_new_tokens=30)
    only = [2] * 20
    (answer,) = rig.run(replace(job, constraint=OneOf([only], VOCAB, 0), stop_ids=frozenset([0])))
    assert answer.tokens[0][:20] == only
    assert usage_of(answer).drafted_tokens == 0 and not verifying(rig)


@pytest.mark.parametrize("bad_at", range(1, 30, 4))
def test_a_token_that_cannot_be_drawn_ends_the_job_where_it_would_alone(bad_at: int) -> None:
    rig = drafting_rig(8)
    job = repeating("g", random_tokens(5, 20), max_new_tokens=40)
    tokens = expected_tokens(job)[0]
    rig.worker.bad_states.add(state_of([*job.prompt.tolist(), *tokens[:bad_at]]))
    (answer,) = rig.run(job)
    assert isinstance(answer.error, EngineFault)
    assert f"token {bad_at} of sample 0" in str(answer.error)
    rig.batcher.check_idle()


def test_logits_behind_a_rejected_token_are_nobodys() -> None:
    """They may be no numbers."""
    rig = drafting_rig(8)
    job = repeating("g", random_tokens(5, 20), max_new_tokens=40)
    tokens = [*job.prompt.tolist(), *expected_tokens(job)[0]]
    for at in range(20, len(tokens)):
        wrong = 2 if tokens[at] == 3 else 3
        rig.worker.bad_states.add(state_of([*tokens[:at], wrong]))
    (usage,) = run_right(rig, job)
    assert usage.accepted_tokens < usage.drafted_tokens


def test_a_sample_that_is_stopped_while_its_draft_is_verified_lets_go_of_its_pages() -> None:
    rig = drafting_rig(8)
    rig.submit(repeating("g", random_tokens(5, 20), samples=2, max_new_tokens=40))
    while not (verifying(rig) and rig.plans[-1] in verifying(rig) and rig.in_flight):
        if rig.plan() is None:
            rig.answer()
    rig.batcher.stop_sample("g", 0)
    while rig.turn():
        pass
    assert len(rig.answers["g"].tokens[1]) == 40
    rig.batcher.check_idle()


@pytest.mark.parametrize("error", ["", "lost"])
def test_a_cancelled_or_failed_job_leaves_nothing_behind(error: str) -> None:
    rig = drafting_rig(8)
    rig.submit(repeating("g", random_tokens(5, 20), samples=2, max_new_tokens=40))
    while not (verifying(rig) and rig.in_flight):
        if rig.plan() is None:
            rig.answer()
    if not error:
        rig.batcher.cancel("g")
    rig.answer(error)
    while rig.turn():
        pass
    rig.batcher.check_idle()


def test_bursts_and_drafts_take_turns() -> None:
    """Where drafts are not expected to pay, bursts go on."""
    rig = make_rig(drafts=DraftPolicy(default_tokens=8), pages=120, burst=8)
    rig.run(generate_job("first", [0], max_new_tokens=8))
    rig.plans.clear()
    rig.worker.step_seconds = 0.01
    job = repeating("g", random_tokens(1, 20), max_new_tokens=200)
    run_right(rig, job)
    assert max(plan.repeat for plan in rig.plans) == 8


@pytest.mark.parametrize("burst", [1, 4])
def test_a_text_that_copies_nothing_has_the_very_steps_that_it_has_without(burst: int) -> None:
    """Drafts that do not come true are made and compared, and cost no step anything."""
    plans: list[list[bytes]] = []
    for draft_tokens in (0, 8):
        rig = make_rig(pages=120, burst=burst, drafts=DraftPolicy(default_tokens=draft_tokens))
        rig.run(generate_job("first", [0], max_new_tokens=8))
        rig.plans.clear()
        jobs = [
            generate_job(f"g{n}", random_tokens(n, 30), temperature=5.0, seed=n, max_new_tokens=70)
            for n in range(3)
        ]
        rig.run(*jobs)
        assert all(usage_of(rig.answers[job.request_id]).drafted_tokens == 0 for job in jobs)
        plans.append([plan.SerializeToString(deterministic=True) for plan in rig.plans])
        copying = repeating("copying", random_tokens(4, 20), max_new_tokens=70)
        (usage,) = run_right(rig, copying)
        assert (usage.drafted_tokens > 0) == (draft_tokens > 0)  # where they come true
    assert plans[0] == plans[1]
