"""Generate jobs under a constraint, through the batcher and a literal worker."""

import random
from typing import Any

import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.token_constraints import OneOf
from tests.service.toy_jobs import generate_job, random_tokens, run_right
from tests.service.toy_model import VOCAB

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import InvalidRequest
from stemserve.service.request import GenerateJob, StopCause

END = 0


def random_set(rng: random.Random) -> OneOf:
    count = rng.randrange(1, 12)
    sequences = [rng.choices(range(1, 5), k=rng.randrange(1, 30)) for _ in range(count)]
    return OneOf(sequences, VOCAB, END)


def constrained(name: str, constraint: OneOf, seed: int, **options: Any) -> GenerateJob:
    prompt = random_tokens(seed, 1 + seed % 30)
    return generate_job(
        name,
        prompt,
        temperature=3.0,
        max_new_tokens=40,
        stop_ids=frozenset([END]),
        seed=seed,
        constraint=constraint,
        **options,
    )


def assert_valid(rig: Rig, job: GenerateJob) -> None:
    answer, constraint = rig.answers[job.request_id], job.constraint
    assert isinstance(constraint, OneOf) and answer.error is None
    for sample, tokens in answer.tokens.items():
        said = tokens[:-1] if answer.finish[sample] == StopCause.STOP_ID else tokens
        assert said in [list(each) for each in constraint.sequences]
        assert answer.finish[sample] in (StopCause.STOP_ID, StopCause.COMPLETE)


@pytest.mark.parametrize("pages", [64, 14])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_every_sample_follows_its_own_state(pages: int, in_flight: int) -> None:
    """With few pages, samples give them up and come back."""
    seed = random.SystemRandom().randrange(2**31)
    rng = random.Random(seed)
    print(f"seed {seed}")
    rig = make_rig(pages=pages, in_flight=in_flight, burst=4)
    jobs = [
        constrained(f"{number}", random_set(rng), rng.randrange(1000), samples=rng.randrange(1, 4))
        for number in range(40)
    ]
    rig.run(*jobs)
    for job in jobs:
        assert_valid(rig, job)
        assert len(rig.answers[job.request_id].finish) == len(job.samplers)
    rig.batcher.check_idle()


def is_masked(plan: worker_pb2.StepPlan) -> bool:
    assert {mask.slot for mask in plan.masks} <= set(unpack_int32(plan.sample_slots).tolist())
    return len(plan.masks) > 0


def test_others_have_two_steps_in_flight_beside_one_of_a_constrained_sample() -> None:
    rig = make_rig(in_flight=2, burst=4)
    job = constrained("c", OneOf([[1, 2, 3, 1, 2, 3, 1, 2]], VOCAB, END), 3)
    free = generate_job("free", random_tokens(1, 20), max_new_tokens=30)
    run_right(rig, free)
    rig.submit(job, generate_job("beside", random_tokens(2, 20), max_new_tokens=40))
    masked: list[bool] = []
    rows: list[int] = []
    while rig.turn():
        in_flight = [is_masked(plan) for plan in rig.in_flight]
        assert sum(in_flight) <= 1
        if not rig.answers["c"].finish:
            masked += in_flight
            rows += [len(unpack_int32(plan.positions)) for plan in rig.in_flight]
            assert all(plan.repeat <= 1 for plan in rig.in_flight)
    assert True in masked and False in masked
    assert_valid(rig, job)
    assert any(plan.repeat > 1 for plan in rig.plans)  # behind it bursts come back


@pytest.mark.parametrize("turns", range(5))
def test_a_constrained_job_can_be_cancelled_at_any_time(turns: int) -> None:
    rig = make_rig()
    rig.submit(constrained("c", OneOf([[1] * 30], VOCAB, END), 17, samples=2))
    for _ in range(turns):
        rig.turn()
    rig.batcher.cancel("c")
    while rig.turn():
        pass
    rig.batcher.check_idle()
    assert not rig.answers["c"].finish


def test_a_set_that_allows_nothing_is_refused_before_it_waits() -> None:
    rig = make_rig()
    with pytest.raises(InvalidRequest, match="no token"):
        rig.batcher.submit(constrained("c", OneOf([], VOCAB, END), 1))
    rig.batcher.check_idle()


def test_explaining_a_constrained_job_shows_its_first_decode_step() -> None:
    rig = make_rig()
    plans = list(rig.batcher.explain(constrained("c", OneOf([[1, 2]], VOCAB, END), 1)))
    assert worker_pb2.SEGMENT_KIND_DECODE in unpack_int32(plans[-1][0].segment_kind)
