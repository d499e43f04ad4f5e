"""What the batcher refuses, drops and counts before work begins."""

import pytest
from tests.service.batcher_rig import make_rig
from tests.service.toy_jobs import (
    generate_job,
    label_job,
    likelihood_job,
    random_tokens,
    run_right,
)

from stemserve.service.errors import DeadlinePassed, InvalidRequest, NeverFits, QueueFull
from stemserve.service.request import Job


def test_b45_what_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    rig = make_rig(pages=50)
    too_large: list[Job] = [
        generate_job("long", random_tokens(1, 1000)),
        generate_job("wide", random_tokens(1, 10), samples=8, max_new_tokens=200),
        likelihood_job("context", [random_tokens(1, 801)], [[1]]),
        likelihood_job("item", [random_tokens(1, 100)], [random_tokens(2, 702)]),
        generate_job("samples", [1], samples=9),
    ]
    for job in too_large:
        with pytest.raises(NeverFits):
            rig.submit(job)
    run_right(rig, generate_job("small", random_tokens(1, 10)))


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    rig = make_rig(max_queued_requests=2)
    rig.submit(*(generate_job(f"{n}", random_tokens(n, 9)) for n in range(2)))
    with pytest.raises(QueueFull) as refusal:
        rig.submit(generate_job("third", [1]))
    assert refusal.value.retry_after_s > 0
    assert rig.batcher.load().queued_by_priority == (0, 2, 0)


def test_queued_tokens_count_only_what_must_be_computed() -> None:
    rig = make_rig(max_queued_tokens=60)
    context = random_tokens(1, 50)
    run_right(rig, label_job("first", [context], [[1]], [0]))
    rig.submit(*(label_job(f"{n}", [context], [[n]], [0]) for n in range(20)))
    assert rig.batcher.load().queued_tokens == 20
    with pytest.raises(QueueFull):
        rig.submit(label_job("cold", [random_tokens(2, 50)], [[1]], [0]))


def test_b51_late_jobs_end_before_they_reach_a_step() -> None:
    rig = make_rig()
    with pytest.raises(DeadlinePassed):
        rig.submit(generate_job("past", [1], deadline=0.0))
    queued = generate_job("queued", [1, 2], deadline=5.0)
    running = generate_job("running", [1, 2, 3], deadline=2.0, max_new_tokens=100)
    rig.submit(running)
    rig.turn()
    rig.submit(queued)
    rig.now = 6.0
    steps = len(rig.plans)
    while rig.turn():
        pass
    assert len(rig.plans) == steps
    for name in ("queued", "running"):
        assert isinstance(rig.answers[name].error, DeadlinePassed)
    rig.batcher.check_idle()


def test_a_request_id_that_runs_is_refused() -> None:
    rig = make_rig()
    rig.submit(generate_job("g", [1]))
    with pytest.raises(InvalidRequest):
        rig.submit(generate_job("g", [1]))


def test_times_are_those_of_the_clock() -> None:
    rig = make_rig()
    job = label_job("s", [[1, 2]], [[3]], [0])
    rig.submit(job)
    rig.now = 2.0
    rig.plan()
    rig.now = 5.0
    rig.answer()
    result = rig.answers["s"].result
    assert result is not None
    assert (result.timing.queue_s, result.timing.engine_s) == (2.0, 3.0)


def test_deadlines_far_away_of_calls_that_have_ended_are_forgotten() -> None:
    rig = make_rig(slots=64)
    for n in range(1000):
        rig.run(generate_job(f"{n}", [1, n], max_new_tokens=1, deadline=1e9))
    kept = rig.batcher._deadlines  # pyright: ignore[reportPrivateUsage]
    assert len(kept) < 100


def test_no_more_is_accepted_than_can_be_done_in_the_time_that_is_set() -> None:
    rig = make_rig(pages=600, max_queued_s=0.5)
    for seed in range(4):
        run_right(rig, label_job(f"warm{seed}", [random_tokens(seed, 200)], [[1]], [0]))
    accepted = 0
    with pytest.raises(QueueFull, match="accepted"):
        for accepted in range(200):
            context = random_tokens(100 + accepted, 100)
            rig.submit(label_job(f"{accepted}", [context], [[1]], [0]))
            rig.plan()
    assert 5 < accepted < 100
    while rig.turn():
        pass
    rig.submit(label_job("later", [random_tokens(99, 100)], [[1]], [0]))
    while rig.turn():
        pass
    rig.batcher.check_idle()
