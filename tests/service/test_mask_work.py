"""Masks that take long are made beside the step loop: who waits for them, and who does not."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.test_batcher_constraints import END, assert_valid, constrained, random_set
from tests.service.token_constraints import OneOf
from tests.service.toy_jobs import generate_job, random_tokens
from tests.service.toy_model import VOCAB

from stemserve.service.batching.mask_work import SLOW_S, MaskWork, run_here
from stemserve.service.errors import InvalidRequest
from stemserve.service.request import GenerateJob, StopCause
from stemserve.service.workers.mask_threads import MaskThreads
from stemserve.service.workers.step_commands import Inbox


def slow(sequences: list[list[int]]) -> OneOf:
    return OneOf(sequences, VOCAB, END, masks_take_long=True)


@pytest.mark.parametrize("pages", [64, 14])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_every_sample_follows_its_own_state(pages: int, in_flight: int, seed: int) -> None:
    """Masks come at any time; with few pages, samples give them up and come back."""
    rng = random.Random(seed)
    rig = make_rig(pages=pages, in_flight=in_flight, burst=4)
    jobs: list[GenerateJob] = []
    for number in range(20):
        one_of = random_set(rng)
        rules = OneOf(one_of.sequences, VOCAB, END, masks_take_long=rng.random() < 0.7)
        samples = rng.randrange(1, 4)
        jobs.append(constrained(f"{number}", rules, rng.randrange(1000), samples=samples))
    rig.submit(*jobs)
    while rig.turn():
        if rig.late and rng.random() < 0.3:
            rig.make_masks()
    for job in jobs:
        assert_valid(rig, job)
        assert len(rig.answers[job.request_id].finish) == len(job.samplers)
    rig.batcher.check_idle()


def test_nobody_else_waits_for_a_mask() -> None:
    rig = make_rig()
    rig.submit(constrained("c", slow([[1, 2, 3]]), 3))
    while not rig.late:
        rig.turn()
    beside = generate_job("beside", random_tokens(2, 20), max_new_tokens=40)
    rig.submit(beside)
    while not rig.answers["beside"].finish:
        assert rig.in_flight or rig.plan() is not None
        rig.answer()
    assert len(rig.answers["beside"].tokens[0]) == 40
    assert rig.answers["c"].tokens == {0: [1]} and len(rig.late) == 1
    while rig.turn():
        pass
    assert rig.answers["c"].tokens == {0: [1, 2, 3]}


def test_samples_that_were_in_one_step_go_on_in_one_step() -> None:
    rig = make_rig(in_flight=2)
    rules = slow([[first, *[1] * 8] for first in range(1, 4)])
    rig.submit(*(constrained(f"{n}", rules, 16 * n, samples=2) for n in range(3)))
    while not all(rig.answers[f"{n}"].tokens for n in range(3)):
        rig.turn()
    while rig.turn():
        assert len(rig.late) <= 1
    rows = [len(plan.masks) for plan in rig.plans if plan.masks]
    assert rows[1:].count(6) >= 7, rows


@pytest.mark.parametrize("how", ["cancel", "stop", "lost"])
@pytest.mark.parametrize("turns", range(6))
def test_a_job_may_end_while_its_masks_are_made(turns: int, how: str) -> None:
    rig = make_rig()
    job = constrained("c", slow([[1] * 30]), 17, samples=2)
    rig.submit(job)
    for _ in range(turns):
        rig.turn()
    while not rig.late and rig.turn():
        pass
    if how == "cancel":
        rig.batcher.cancel("c")
    elif how == "stop":
        rig.batcher.stop_sample("c", 0)
    else:
        rig.take(rig.batcher.fail_all(InvalidRequest("x", "lost")))
        rig.in_flight.clear()
    while rig.turn():
        pass
    rig.batcher.check_idle()
    if how == "stop":
        assert rig.answers["c"].tokens[1] == [1] * 30 and 0 not in rig.answers["c"].finish


@pytest.mark.parametrize(
    ("sequences", "banned"), [([[1, 2], [1]], [2, END]), ([[1, 2]], [2])], ids=["whole", "not"]
)
def test_a_mask_that_leaves_nothing_ends_a_sample_when_it_is_there(
    sequences: list[list[int]], banned: list[int]
) -> None:
    rig = make_rig()
    job = constrained("c", slow(sequences), 3)
    spec = replace(job.samplers[0], banned_ids=np.array(sorted(banned), np.int32))
    (answer,) = rig.run(replace(job, samplers=(spec,)))
    assert answer.tokens == {0: [1]}
    if len(sequences) == 2:
        assert answer.finish == {0: StopCause.COMPLETE} and answer.error is None
    else:
        assert isinstance(answer.error, InvalidRequest) and "banned" in str(answer.error)
    rig.batcher.check_idle()


def test_a_fault_of_one_piece_of_work_is_its_own() -> None:
    masks = MaskWork(run_here)
    pieces = [masks.add(number, partial(divmod, 1, number)) for number in (1, 0, 1)]
    assert not masks.take_done() and not any(piece.is_done for piece in pieces)
    masks.send()
    assert masks.take_done() == [1, 0] and not masks.take_done()
    assert pieces[0].take() == pieces[2].take() == (1, 0)
    with pytest.raises(ZeroDivisionError):
        pieces[1].take()


def test_threads_make_them_and_call_the_step_loop() -> None:
    inbox, go_on, noted = Inbox(), threading.Event(), list[float]()

    def make() -> str:
        go_on.wait()
        return threading.current_thread().name

    with MaskThreads(inbox, note=noted.append) as threads:
        masks = MaskWork(threads.run)
        piece = masks.add(7, make)
        masks.send()
        assert not masks.take_done()
        go_on.set()
        inbox.wait(60.0)
        assert masks.take_done() == [7] and piece.take().startswith("masks")
    assert len(noted) == 1 and noted[0] > 0


def test_a_job_whose_masks_take_very_long_holds_up_no_other() -> None:
    """From its second step on, with which its first is compared here by hand."""
    sent: list[tuple[Callable[[], None], bool]] = []

    def run(work: Callable[[], None], *, slow: bool) -> None:
        sent.append((work, slow))

    def result_of(*seconds: float) -> list[bool]:
        """A step's result with a piece of work for each job; which of the rounds are slow."""
        pieces = [masks.add(job, lambda: True) for job in range(len(seconds))]
        masks.send()
        slow = [is_slow for _, is_slow in sent]
        for work, _ in reversed(sent):
            work()
        sent.clear()
        for piece, taken in zip(pieces, seconds, strict=True):
            assert piece.is_done
            piece.seconds = taken
        assert sorted(masks.take_done()) == list(range(len(seconds)))
        return slow

    masks = MaskWork(run)
    assert result_of(0.0, 2 * SLOW_S, 0.0) == [False]
    assert result_of(0.0, 2 * SLOW_S, 3 * SLOW_S) == [False, True]
    assert result_of(0.0, 0.0, 2 * SLOW_S) == [False, True, True]
    assert result_of(0.0, 0.0, 0.0) == [False, True]
    assert result_of(0.0, 0.0, 0.0) == [False]
