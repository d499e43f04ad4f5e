"""The step loop's thread: what it plans, delivers and gives up."""

import threading
import time
from collections.abc import Iterator

import pytest
from tests.service.step_loop_rig import PATIENCE_S, Rig, facts, job

from stemserve.proto.v1 import worker_pb2
from stemserve.service.errors import DeadlinePassed, EngineFault, NotReady, QueueFull
from stemserve.service.request import (
    Event,
    JobFailed,
)
from stemserve.service.workers.step_commands import (
    Attach,
    Cancel,
    Lost,
    Result,
    Submit,
)
from stemserve.service.workers.step_loop import MOST_UNCOUNTED


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.loop.stop()


def failures(events: list[Event]) -> dict[str, Exception]:
    return {event.request_id: event.error for event in events if isinstance(event, JobFailed)}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_the_worker_allows(rig: Rig, steps_in_flight: int) -> None:
    rig.attach(steps_in_flight=steps_in_flight)
    rig.submit(job("a", tokens=9))
    assert [rig.next_plan() for _ in range(steps_in_flight)] == list(range(steps_in_flight))
    rig.ask(lambda batcher: None)
    assert rig.plans.empty()
    rig.answer(0)
    assert rig.next_plan() == steps_in_flight


def test_what_came_before_a_step_is_in_it(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a", tokens=2))
    rig.next_plan()
    rig.submit(job("b"), job("c"))
    rig.answer(0)
    rig.next_plan()
    assert rig.batchers[0].steps == [["a"], ["a", "b", "c"]]


def test_all_events_of_a_step_are_delivered_at_once(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("first"))
    rig.next_plan()
    rig.submit(job("a"), job("b"))
    rig.answer(0)
    assert [event.request_id for event in rig.next_news()] == ["first"]
    rig.answer(rig.next_plan())
    assert [event.request_id for event in rig.next_news()] == ["a", "b"]
    rig.ask(lambda batcher: batcher.load())  # results are observed before what comes later
    assert rig.observed == [0, 1]


def test_who_brings_jobs_or_a_result_plans_the_next_step(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.ask(lambda batcher: None)
    for request_id in ("a", "b"):
        rig.inbox.leave(Submit(job=job(request_id, tokens=2)))
    assert rig.plans.empty()
    rig.inbox.work(wait=False)
    assert rig.plans.get_nowait().step_id == 0
    rig.inbox.leave(Result(generation=1, result=worker_pb2.StepResult(step_id=0)))
    rig.inbox.work(wait=True)
    assert rig.plans.get_nowait().step_id == 1
    assert rig.batchers[0].steps == [["a", "b"]] * 2
    assert set(rig.senders) == {threading.current_thread().name}


def test_a_turn_that_another_thread_has_takes_over_what_is_brought_meanwhile(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    entered, go_on = threading.Event(), threading.Event()

    def hold(batcher: object) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    asking = threading.Thread(target=rig.ask, args=(hold,))
    asking.start()
    assert entered.wait(PATIENCE_S)
    rig.inbox.leave(Submit(job=job("a")))
    rig.inbox.work(wait=False)  # returns at once
    assert rig.plans.empty()
    go_on.set()
    asking.join()
    assert rig.next_plan() == 0
    assert rig.senders == ["step-loop"]


def test_commands_brought_by_threads_at_once_are_all_worked_off(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    names = [[f"{caller}-{number}" for number in range(50)] for caller in range(4)]

    def bring(caller: int) -> None:
        for name in names[caller]:
            if caller % 2:
                rig.inbox.put(Submit(job=job(name)))
            else:
                rig.inbox.leave(Submit(job=job(name)))
                rig.inbox.work(wait=caller == 0)

    threads = [threading.Thread(target=bring, args=(caller,)) for caller in range(4)]
    for thread in threads:
        thread.start()
    done: list[str] = []
    while len(done) < 200:
        rig.answer(rig.next_plan())
        done += [event.request_id for event in rig.next_news()]
    for thread in threads:
        thread.join()
    assert sorted(done) == sorted(name for caller in names for name in caller)
    for caller in names:  # what one thread brings stays in order
        assert [name for name in done if name in caller] == caller


def test_results_are_observed_when_somebody_wants_to_know_or_many_have_come(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a", tokens=MOST_UNCOUNTED + 3))
    for number in range(MOST_UNCOUNTED + 2):
        rig.answer(rig.next_plan())
        rig.next_news()
        if number == 1:
            rig.loop.observe_results()
            assert rig.observed == [0, 1]
    rig.next_plan()
    assert rig.observed == list(range(MOST_UNCOUNTED + 2))


def test_without_a_worker_jobs_and_questions_get_not_ready(rig: Rig) -> None:
    rig.submit(job("a"))
    assert isinstance(failures(rig.next_news())["a"], NotReady)
    with pytest.raises(NotReady):
        rig.ask(lambda batcher: batcher.load())


def test_a_refused_job_fails_and_the_others_go_on(rig: Rig) -> None:
    rig.attach()
    rig.submit(job("refused"), job("broken"), job("a"))
    errors = failures(rig.next_news())
    assert isinstance(errors["refused"], QueueFull)
    assert isinstance(errors["broken"], EngineFault)
    rig.answer(rig.next_plan())
    assert [event.request_id for event in rig.next_news()] == ["a"]


def test_a_lost_worker_fails_its_jobs_and_its_late_results_are_dropped(rig: Rig) -> None:
    rig.attach(generation=1)
    rig.submit(job("a", tokens=5), job("b", tokens=5))
    rig.next_plan()
    rig.inbox.put(Lost(generation=1, reason="killed"))
    errors = failures(rig.next_news())
    assert errors.keys() == {"a", "b"}
    assert all(isinstance(error, NotReady) for error in errors.values())
    assert rig.losses.get(timeout=PATIENCE_S) == (1, "killed")

    rig.attach(generation=2)
    rig.answer(0, generation=1)
    rig.inbox.put(Lost(generation=1, reason="late"))
    rig.submit(job("c"))
    while rig.ask(lambda batcher: batcher.steps) == []:
        time.sleep(0.01)
    rig.answer(0, generation=2)
    assert [event.request_id for event in rig.next_news()] == ["c"]
    assert rig.losses.empty()


def test_a_fault_fails_the_jobs_and_the_thread_lives_on(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a", tokens=5))
    rig.next_plan()
    rig.batchers[0].fault = RuntimeError("broken plan")
    rig.answer(0)
    error = failures(rig.next_news())["a"]
    assert isinstance(error, EngineFault)
    assert "broken plan" in str(error)
    assert rig.losses.get(timeout=PATIENCE_S)[0] == 1
    rig.attach(generation=2)
    rig.submit(job("b"))
    assert rig.next_plan() == 0


def test_a_worker_that_cannot_be_planned_for_counts_as_lost(rig: Rig) -> None:
    rig.inbox.put(Attach(generation=1, worker=rig, facts=facts(kv_pages=0)))
    assert rig.losses.get(timeout=PATIENCE_S)[0] == 1
    rig.attach(generation=2)
    rig.submit(job("a"))
    assert rig.next_plan() == 0


def test_a_question_that_fails_harms_nobody_else(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a"))
    with pytest.raises(ZeroDivisionError):
        rig.ask(lambda batcher: 1 // 0)
    rig.answer(rig.next_plan())
    assert [event.request_id for event in rig.next_news()] == ["a"]


def test_who_asks_hears_of_a_fault_in_what_counts_results(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a"))
    rig.answer(rig.next_plan())
    rig.next_news()
    rig.fault_of_observer = ValueError("no such label")
    with pytest.raises(NotReady):
        rig.ask(lambda batcher: batcher.load())
    assert "no such label" in rig.losses.get(timeout=PATIENCE_S)[1]


def test_a_cancelled_job_is_not_planned_again(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a", tokens=5))
    rig.next_plan()
    rig.inbox.put(Cancel(request_id="a"))
    rig.inbox.put(Cancel(request_id="unknown"))
    rig.answer(0)
    assert rig.ask(lambda batcher: batcher.load()).running_requests == 0
    assert rig.plans.empty()


def test_a_job_ends_at_its_deadline_without_any_other_news(rig: Rig) -> None:
    rig.attach()
    rig.submit(job("a", tokens=5, deadline=time.monotonic() + 0.1))
    assert isinstance(failures(rig.next_news())["a"], DeadlinePassed)
    assert rig.ask(lambda batcher: batcher.load()).running_requests == 0


def test_a_deadline_of_a_job_that_another_thread_took_in_wakes_the_loop(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a"))
    rig.next_plan()
    rig.ask(lambda batcher: None)
    rig.inbox.leave(Submit(job=job("b", deadline=time.monotonic() + 0.05)))
    rig.inbox.work(wait=True)
    assert isinstance(failures(rig.next_news())["b"], DeadlinePassed)


def test_the_loop_outlives_a_deadline_of_eleven_thousand_years(rig: Rig) -> None:
    """The longest that gRPC has, 99,999,999 hours: no thread can sleep that long at once."""
    rig.attach()
    rig.submit(job("a", tokens=0, deadline=time.monotonic() + 3.6e11))  # no step wakes the loop
    rig.ask(lambda batcher: None)
    assert rig.ask(lambda batcher: batcher.load()).running_requests == 1


def test_news_that_no_result_brought_is_delivered_too(rig: Rig) -> None:
    rig.attach(steps_in_flight=1)
    rig.submit(job("a", tokens=5))
    rig.next_plan()
    late = JobFailed(request_id="a", error=DeadlinePassed("late"))
    rig.ask(lambda batcher: batcher.late.append(late))
    assert rig.next_news() == [late]


def test_a_silent_worker_is_given_up() -> None:
    rig = Rig(step_timeout_s=0.1)
    rig.attach()
    rig.submit(job("a"))
    error = failures(rig.next_news())["a"]
    assert isinstance(error, NotReady)
    assert "is not answered after 0.1 s" in rig.losses.get(timeout=PATIENCE_S)[1]
    rig.loop.stop()


def test_jobs_that_run_at_the_stop_fail(rig: Rig) -> None:
    rig.attach()
    rig.submit(job("a", tokens=5))
    rig.next_plan()
    rig.loop.stop()
    assert isinstance(failures(rig.next_news())["a"], NotReady)
