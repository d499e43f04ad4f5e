"""Bursts of decode steps give what single steps give, whatever happens in them."""

from dataclasses import replace
from typing import Any

import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.toy_jobs import expected_tokens, generate_job, random_tokens, run_right
from tests.service.toy_model import extend, state_of

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import EngineFault
from stemserve.service.request import GenerateJob, StopCause

PREFILL = worker_pb2.SEGMENT_KIND_PREFILL


def burst_rig(burst: int, **options: Any) -> Rig:
    """A worker whose steps are known to be short."""
    rig = make_rig(burst=burst, **options)
    run_right(rig, generate_job("first", [1], max_new_tokens=12))
    rig.plans.clear()
    return rig


def bursts(rig: Rig) -> list[int]:
    return [plan.repeat for plan in rig.plans if plan.repeat]


@pytest.mark.parametrize("burst", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("new_tokens", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_any_length_ends_where_it_must(burst: int, new_tokens: int, in_flight: int) -> None:
    rig = burst_rig(burst, in_flight=in_flight)
    prompt = random_tokens(new_tokens, 14)  # pages are crossed inside bursts
    job = generate_job("g", prompt, samples=3, max_new_tokens=new_tokens, temperature=1.0, seed=5)
    run_right(rig, job)
    assert rig.answers["g"].finish == dict.fromkeys(range(3), StopCause.LENGTH)
    largest = 1 << (burst.bit_length() - 1)
    assert max(bursts(rig), default=1) == max(1, min(largest, new_tokens - 1))
    rig.batcher.check_idle()


def test_a_long_generation_takes_few_steps_and_gives_as_many_events() -> None:
    rig = burst_rig(8)
    run_right(rig, generate_job("g", random_tokens(1, 20), samples=4, max_new_tokens=65))
    assert bursts(rig) == [8] * 8
    assert len(rig.plans) == 9
    assert rig.answers["g"].num_events == 9


def test_rows_of_many_lengths_share_bursts() -> None:
    rig = burst_rig(8, slots=16, pages=200)
    jobs = [
        generate_job(f"{n}", random_tokens(n, 10 + n), max_new_tokens=20 + n, temperature=1.0)
        for n in range(10)
    ]
    run_right(rig, *jobs)
    assert 8 in bursts(rig)
    steps = [set(unpack_int32(plan.row_steps).tolist()) for plan in rig.plans if plan.repeat]
    assert any(len(different) > 1 for different in steps)


@pytest.mark.parametrize("stop_at", [2, 7, 8, 9, 11, 15])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_stop_inside_a_burst_drops_what_follows(stop_at: int, in_flight: int) -> None:
    rig = burst_rig(8, in_flight=in_flight)
    free = generate_job("g", random_tokens(3, 30), max_new_tokens=40)
    tokens = expected_tokens(free)[0]
    stop = tokens[stop_at]
    job = replace(free, stop_ids=frozenset([stop]))
    run_right(rig, job)
    assert len(rig.answers["g"].tokens[0]) == tokens.index(stop) + 1
    rig.batcher.check_idle()


def test_nobody_waits_for_a_burst_to_begin() -> None:
    rig = burst_rig(8)
    rig.submit(generate_job("running", random_tokens(1, 20), max_new_tokens=60))
    for _ in range(3):
        rig.turn()
    rig.submit(generate_job("new", random_tokens(2, 100), max_new_tokens=30))
    first = len(rig.plans)
    while rig.turn():
        pass
    prompt = [PREFILL in unpack_int32(plan.segment_kind) for plan in rig.plans[first:]]
    assert prompt[:3] == [True, True, False]  # 100 rows in steps of 64
    rig.batcher.check_idle()


def test_a_burst_is_as_short_as_its_time_allows() -> None:
    rig = make_rig(burst=8, max_burst_s=0.045)
    run_right(rig, generate_job("g", [1], max_new_tokens=60))
    assert max(bursts(rig)) == 4  # steps of 10 ms


def test_no_burst_before_the_worker_is_known() -> None:
    rig = make_rig(burst=8)
    run_right(rig, generate_job("g", [1], max_new_tokens=40))
    assert [plan.repeat for plan in rig.plans][:5] == [0] * 5
    assert bursts(rig)


def test_few_free_pages_shorten_bursts() -> None:
    rig = burst_rig(32, pages=9, in_flight=1)
    jobs = [
        generate_job(f"{n}", random_tokens(n, 16), max_new_tokens=50, temperature=1.0, seed=n)
        for n in range(2)
    ]
    run_right(rig, *jobs)
    assert bursts(rig)
    rig.batcher.check_idle()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pages_that_a_stopped_sample_did_not_fill_come_back(in_flight: int) -> None:
    rig = burst_rig(32, in_flight=in_flight)
    free = generate_job("g", random_tokens(8, 16), max_new_tokens=60)
    job = replace(free, stop_ids=frozenset([expected_tokens(free)[0][1]]))
    run_right(rig, job)
    rig.batcher.check_idle()
    load = rig.batcher.load()
    assert load.used_pages == 0 and load.free_pages + load.cached_pages == 64


def test_a_generation_that_was_stopped_in_a_burst_is_found_again() -> None:
    rig = burst_rig(8, in_flight=1)
    free = generate_job("g", random_tokens(4, 20), max_new_tokens=40)
    job = replace(free, stop_ids=frozenset([expected_tokens(free)[0][13]]))
    run_right(rig, job)
    talk = random_tokens(4, 20) + expected_tokens(job)[0]
    following = generate_job("next", [*talk, 1, 2, 3])
    assert run_right(rig, following)[0].cached_tokens == len(talk) - 1


@pytest.mark.parametrize("when", [1, 2])
def test_a_job_can_be_cancelled_in_a_burst(when: int) -> None:
    rig = burst_rig(8)
    stays = generate_job("stays", random_tokens(5, 20), samples=2, max_new_tokens=60)
    rig.submit(stays, generate_job("goes", random_tokens(6, 20), max_new_tokens=60))
    for _ in range(3 * when):
        rig.turn()
    rig.plan()
    assert rig.plans[-1].repeat == 8
    rig.batcher.cancel("goes")
    while rig.turn():
        pass
    assert rig.answers["stays"].tokens == expected_tokens(stays)
    rig.batcher.check_idle()


def test_a_sample_can_be_stopped_from_outside_in_a_burst() -> None:
    rig = burst_rig(8)
    job = generate_job("g", [1, 2, 3], samples=2, temperature=1.0, max_new_tokens=60)
    rig.submit(job)
    for _ in range(4):
        rig.turn()
    rig.plan()
    rig.batcher.stop_sample("g", 0)
    known = list(rig.answers["g"].tokens[0])
    while rig.turn():
        pass
    assert rig.answers["g"].tokens == {0: known, 1: expected_tokens(job)[1]}
    rig.batcher.check_idle()


def fail_token(rig: Rig, job: GenerateJob, number: int) -> None:
    """The logits behind the first tokens of the job are not finite."""
    state = state_of(job.prompt.tolist())
    for token in expected_tokens(job)[0][:number]:
        state = extend(state, token)
    rig.worker.bad_states.add(state)


@pytest.mark.parametrize("number", range(5, 14))
def test_a_row_that_fails_in_a_burst_fails_its_job_there(number: int) -> None:
    rig = burst_rig(8)
    job = generate_job("bad", random_tokens(7, 20), max_new_tokens=40)
    other = generate_job("good", random_tokens(8, 20), max_new_tokens=40)
    fail_token(rig, job, number)
    bad, good = rig.run(job, other)
    assert isinstance(bad.error, EngineFault) and f"token {number} of" in str(bad.error)
    assert good.tokens == expected_tokens(other)
    assert bad.tokens.get(0, []) == expected_tokens(job)[0][: len(bad.tokens.get(0, []))]
    rig.batcher.check_idle()


def test_what_fails_behind_a_stop_is_not_looked_at() -> None:
    rig = burst_rig(8)
    free = generate_job("g", random_tokens(9, 20), max_new_tokens=40)
    tokens = expected_tokens(free)[0]
    at = next(n for n in range(9, 12) if tokens[n] not in tokens[:n])
    fail_token(rig, free, at + 2)
    job = replace(free, stop_ids=frozenset([tokens[at]]))
    run_right(rig, job)
    rig.batcher.check_idle()


@pytest.mark.parametrize("behind", [0, 1])
def test_a_burst_that_fails_takes_its_jobs_with_it(behind: int) -> None:
    rig = burst_rig(8)
    jobs = [generate_job(f"{n}", random_tokens(n, 20), max_new_tokens=60) for n in range(2)]
    rig.submit(*jobs)
    for _ in range(5):
        rig.turn()
    while len(rig.in_flight) < 2:
        rig.plan()
    for _ in range(behind):
        rig.answer()
    rig.answer("out of luck")
    while rig.turn():
        pass
    assert all(isinstance(rig.answers[job.request_id].error, EngineFault) for job in jobs)
    rig.batcher.check_idle()
    run_right(rig, generate_job("after", random_tokens(0, 20), max_new_tokens=30))


def test_a_generation_that_gives_way_in_the_middle_of_bursts_comes_back_unchanged() -> None:
    rig = burst_rig(8, pages=10, slots=8)
    jobs = [
        generate_job(
            f"{n}", random_tokens(n, 20), samples=2, max_new_tokens=50, temperature=1.0, seed=n
        )
        for n in range(3)
    ]
    run_right(rig, *jobs)
    assert bursts(rig)
    rig.batcher.check_idle()


def test_who_waits_for_a_slot_does_not_stop_bursts_and_is_looked_at_between_them() -> None:
    rig = burst_rig(8, slots=1)
    jobs = [generate_job(f"{n}", random_tokens(n, 20), max_new_tokens=60) for n in range(2)]
    rig.submit(*jobs)
    while rig.answers["0"].last is None:
        rig.turn()
    lengths = [max(1, plan.repeat) for plan in rig.plans]
    assert lengths.count(8) >= 4
    assert 8 not in {a for a, b in zip(lengths, lengths[1:], strict=False) if a == b}
    while rig.turn():
        pass
    assert rig.answers["1"].tokens == expected_tokens(jobs[1])
    rig.batcher.check_idle()
