"""Generate jobs through the batcher and a literal worker."""

from dataclasses import replace

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.toy_jobs import (
    again,
    expected_tokens,
    generate_job,
    label_job,
    random_tokens,
    run_right,
)

from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import NeverFits
from stemserve.service.request import Job, StopCause


@pytest.mark.parametrize(("length", "cached"), [(16, 15), (31, 30), (32, 31), (33, 32)])
def test_a_prompt_sent_twice_runs_its_last_row_again(length: int, cached: int) -> None:
    rig = make_rig()
    prompt = random_tokens(length, length)
    job = generate_job("g", prompt, max_new_tokens=1)
    usages = [run_right(rig, again(job, number))[0] for number in range(3)]
    assert [usage.cached_tokens for usage in usages] == [0, cached, cached]
    assert [usage.computed_tokens for usage in usages] == [length, 1, 1]
    assert not np.any(unpack_int32(rig.plans[-1].kv_slots) >= 0)
    score = label_job("s", [prompt], [random_tokens(3, 2)], [0, 2])
    assert run_right(rig, score)[0].cached_tokens == length


def test_a_finished_generation_is_found_by_the_next_turn_of_the_talk() -> None:
    rig = make_rig(in_flight=1)
    job = generate_job("g", random_tokens(1, 20), max_new_tokens=30)
    run_right(rig, job)
    talk = random_tokens(1, 20) + expected_tokens(job)[0]
    following = generate_job("next", [*talk, 1, 2, 3])
    assert run_right(rig, following)[0].cached_tokens == len(talk) - 1  # the last token has no KV


@pytest.mark.parametrize(("new_tokens", "last_position"), [(1, 59), (4, 62)])
def test_no_row_is_run_behind_the_last_token(new_tokens: int, last_position: int) -> None:
    rig = make_rig(in_flight=3)
    job = generate_job("g", random_tokens(1, 60), max_new_tokens=new_tokens)
    run_right(rig, job)
    assert rig.answers["g"].finish == {0: StopCause.LENGTH}
    assert max(unpack_int32(plan.positions).max() for plan in rig.plans) == last_position


def test_a_stop_ends_its_sample_only_and_the_row_in_flight_is_dropped() -> None:
    rig = make_rig()
    free = generate_job("free", [1, 2], samples=4, temperature=1.0, max_new_tokens=12)
    stop = expected_tokens(free)[2][2]
    job = replace(free, stop_ids=frozenset([stop]))
    run_right(rig, job)
    assert rig.answers["free"].finish[2] == StopCause.STOP_ID
    rig.batcher.check_idle()


def test_a_sample_can_be_stopped_from_outside() -> None:
    rig = make_rig()
    job = generate_job("g", [1, 2, 3], samples=2, temperature=1.0, max_new_tokens=30)
    rig.submit(job)
    for _ in range(4):
        rig.turn()
    rig.batcher.stop_sample("g", 0)
    known = list(rig.answers["g"].tokens[0])
    while rig.turn():
        pass
    answer = rig.answers["g"]
    assert answer.tokens == {0: known, 1: expected_tokens(job)[1]}
    assert answer.last is not None
    rig.batcher.check_idle()


def test_stopping_the_last_sample_ends_the_job_without_another_step() -> None:
    rig = make_rig(in_flight=1)
    rig.submit(generate_job("g", [1, 2, 3], max_new_tokens=30))
    rig.turn()
    rig.batcher.stop_sample("g", 0)
    rig.take(rig.batcher.take_events())
    assert rig.answers["g"].last is not None
    assert not rig.turn()
    rig.batcher.check_idle()


@pytest.mark.parametrize("turns", range(50, 62))
def test_what_a_stopped_sample_has_not_run_again_is_not_in_the_cache(turns: int) -> None:
    rig = make_rig(pages=10, budget=12)
    jobs = [
        generate_job(f"{n}", random_tokens(n, 20), samples=2, max_new_tokens=50, temperature=1.0)
        for n in range(3)
    ]
    rig.submit(*jobs)
    for _ in range(turns):
        rig.turn()
    rig.batcher.stop_sample("1", 1)
    rig.batcher.cancel("0")
    rig.batcher.cancel("2")
    talk = [*jobs[1].prompt.tolist(), *rig.answers["1"].tokens[1], 1]
    run_right(rig, generate_job("next", talk, max_new_tokens=2))
    rig.batcher.check_idle()


@pytest.mark.parametrize(("samples", "new_tokens", "pages"), [(1, 101, 50), (3, 21, 49)])
def test_what_fits_exactly_runs(samples: int, new_tokens: int, pages: int) -> None:
    rig = make_rig(pages=pages, budget=64)
    job = generate_job("g", random_tokens(1, 700), samples=samples, max_new_tokens=new_tokens)
    run_right(rig, job)
    run_right(rig, again(job, 2), label_job("s", [random_tokens(2, pages * 16)], [[1]], [0]))
    with pytest.raises(NeverFits):
        make_rig(pages=pages - 1).submit(job)
    rig.batcher.check_idle()


def test_b57_generations_that_outgrow_the_pool_give_way_and_come_back_unchanged() -> None:
    rig = make_rig(pages=10, slots=8)
    jobs: list[Job] = [
        generate_job(
            f"{n}", random_tokens(n, 20), samples=2, max_new_tokens=50, temperature=1.0, seed=n
        )
        for n in range(3)
    ]
    usages = run_right(rig, *jobs)
    assert [usage.cached_tokens for usage in usages] == [0, 0, 0]  # rows run again are no hits
    assert [usage.computed_tokens for usage in usages] == [20, 20, 20]
    assert rig.worker.rows_run > sum(20 + 2 * 50 for _ in jobs)
    rig.batcher.check_idle()


def test_b48_salts_keep_equal_prompts_apart() -> None:
    rig = make_rig()
    job = generate_job("g", random_tokens(1, 40), max_new_tokens=2)
    salts = [b"A", b"A", b"B", b"", b""]
    cached = [
        run_right(rig, replace(job, request_id=f"{n}", salt=salt))[0].cached_tokens
        for n, salt in enumerate(salts)
    ]
    assert cached == [0, 39, 0, 0, 39]


class SameHash(bytes):
    """A salt whose hash is that of any other."""

    def __hash__(self) -> int:
        return 1


def test_b48_salts_of_one_hash_are_still_apart() -> None:
    rig = make_rig()
    job = generate_job("g", random_tokens(1, 40), max_new_tokens=2)
    cached = [
        run_right(rig, replace(job, request_id=f"{n}", salt=SameHash(salt)))[0].cached_tokens
        for n, salt in enumerate([b"A", b"A", b"B", b"A"])
    ]
    assert cached == [0, 39, 0, 39]


def test_b50_500_cancelled_generations_leave_nothing_behind() -> None:
    rig = make_rig(pages=30, budget=16)
    rng = np.random.default_rng(0)
    for number in range(500):
        job = generate_job(f"{number}", random_tokens(number % 7, 30), samples=4, max_new_tokens=60)
        rig.submit(job)
        for _ in range(rng.integers(5)):
            rig.turn()
        rig.batcher.cancel(job.request_id)
    while rig.turn():
        pass
    assert all(not answer.finish for answer in rig.answers.values())
    rig.batcher.check_idle()


def test_samplers_of_many_calls_with_large_biases_go_out_over_several_steps() -> None:
    rig = make_rig(budget=64)
    ids = np.zeros(1 << 20, np.int32)  # 8 MiB with their values
    for number in range(5):
        job = generate_job(f"g{number}", random_tokens(number, 4), samples=2)
        specs = [
            replace(spec, bias_ids=ids, bias_values=np.zeros(len(ids), np.float32))
            for spec in job.samplers
        ]
        rig.submit(replace(job, samplers=tuple(specs)))
    rig.submit(label_job("s", [random_tokens(9, 5)], [[1]], [0]))
    while rig.turn():
        pass
    sent = [len(plan.samplers) for plan in rig.plans]
    assert sum(sent) == 10
    assert max(sent) == 2
    rig.batcher.check_idle()
