"""The step loop's thread, with a batcher that only counts and a worker that answers when told."""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from stemserve.proto.v1 import worker_pb2
from stemserve.service.errors import DeadlinePassed, EngineFault, NotReady, QueueFull
from stemserve.service.request import (
    Event,
    GenerateChunk,
    GenerateJob,
    Int32,
    Job,
    JobFailed,
    JobUsage,
    Load,
    SampleToken,
    WorkerFacts,
)
from stemserve.service.workers.step_commands import (
    Ask,
    Attach,
    Cancel,
    Inbox,
    Lost,
    Result,
    Submit,
)
from stemserve.service.workers.step_loop import StepLoop

PATIENCE_S = 30.0


def facts(steps_in_flight: int = 2, kv_pages: int = 10) -> WorkerFacts:
    return WorkerFacts(
        model="none",
        architecture="none",
        dtype="float32",
        device="none",
        vocab_size=100,
        context_tokens=1000,
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=1,
        page_size=16,
        kv_pages=kv_pages,
        sampler_slots=4,
        steps_in_flight=steps_in_flight,
        has_lm_head=True,
        class_labels=(),
        kv_bytes_per_token=8,
    )


def job(request_id: str, *, tokens: int = 1, deadline: float | None = None) -> GenerateJob:
    return GenerateJob(
        request_id=request_id,
        prompt=np.ones(1, np.int32),
        samplers=(),
        max_new_tokens=tokens,
        stop_ids=frozenset(),
        deadline=deadline,
    )


class CountingBatcher:
    """A job of k tokens takes k steps; a step holds one token of every job."""

    def __init__(self, facts: WorkerFacts) -> None:
        if not facts.kv_pages:
            raise ValueError("no pages")
        self.planned: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.jobs: dict[str, Job] = {}
        self.steps: list[list[str]] = []
        self.fault: Exception | None = None
        self.late: list[Event] = []

    def submit(self, job: Job) -> None:
        if job.request_id == "refused":
            raise QueueFull("full", retry_after_s=1.0)
        if job.request_id == "broken":
            raise ValueError("no such shape")
        self.jobs[job.request_id] = job
        self.planned[job.request_id] = self.done[job.request_id] = 0

    def cancel(self, request_id: str) -> None:
        self.jobs.pop(request_id)

    def stop_sample(self, request_id: str, sample: int) -> None:
        self.jobs.pop(request_id)

    def plan_step(self) -> worker_pb2.StepPlan | None:
        if self.fault is not None:
            raise self.fault
        ready = [name for name in self.jobs if self.planned[name] < self._length(name)]
        if not ready:
            return None
        for name in ready:
            self.planned[name] += 1
        self.steps.append(ready)
        return worker_pb2.StepPlan(step_id=len(self.steps) - 1)

    def apply(self, result: worker_pb2.StepResult) -> list[Event]:
        events: list[Event] = []
        for name in self.steps[result.step_id]:
            if name not in self.jobs:
                continue
            self.done[name] += 1
            last = self.done[name] == self._length(name)
            token = SampleToken(sample=0, token_id=result.step_id, logprob=0.0)
            usage = JobUsage() if last else None
            events.append(GenerateChunk(request_id=name, tokens=(token,), usage=usage))
            if last:
                del self.jobs[name]
        return events

    def take_events(self) -> list[Event]:
        """As the batcher ends late jobs without a step."""
        return [self.late.pop()] if self.late else []

    def explain(self, job: Job) -> Iterator[tuple[worker_pb2.StepPlan, Int32]]:
        return iter(())

    def load(self) -> Load:
        running = len(self.jobs)
        return Load(
            queued_requests=0,
            running_requests=running,
            queued_tokens=0,
            free_pages=0,
            cached_pages=0,
            used_pages=0,
        )

    def resident_tokens(self, tokens: Int32, salt: bytes) -> int:
        return 0

    def _length(self, name: str) -> int:
        found = self.jobs[name]
        assert isinstance(found, GenerateJob)
        return found.max_new_tokens


class Rig:
    """A running step loop with all its ends in the test's hands."""

    def __init__(self, *, step_timeout_s: float = 60.0) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.plans: queue.SimpleQueue[worker_pb2.StepPlan] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.losses: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.observed: list[int] = []
        self.batchers: list[CountingBatcher] = []
        self.loop = StepLoop(
            self.inbox,
            make_batcher=self._make_batcher,
            observe=lambda result, load: self.observed.append(result.step_id),
            step_timeout_s=step_timeout_s,
        )
        self.loop.start(deliver=self.news.put, worker_lost=self._note_loss)

    def _note_loss(self, generation: int, reason: str) -> None:
        self.losses.put((generation, reason))

    def _make_batcher(self, facts: WorkerFacts) -> CountingBatcher:
        self.batchers.append(CountingBatcher(facts))
        return self.batchers[-1]

    def send(self, plan: worker_pb2.StepPlan) -> None:
        self.plans.put(plan)

    def attach(self, generation: int = 1, steps_in_flight: int = 2) -> None:
        self.inbox.put(Attach(generation=generation, worker=self, facts=facts(steps_in_flight)))

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.inbox.put(Submit(job=job))

    def next_plan(self) -> int:
        return self.plans.get(timeout=PATIENCE_S).step_id

    def answer(self, step_id: int, generation: int = 1) -> None:
        result = worker_pb2.StepResult(step_id=step_id)
        self.inbox.put(Result(generation=generation, result=result))

    def next_news(self) -> list[Event]:
        return self.news.get(timeout=PATIENCE_S)

    def ask(self, question: Callable[[Any], Any]) -> Any:
        reply: Future[Any] = Future()
        self.inbox.put(Ask(question=question, reply=reply))
        return reply.result(PATIENCE_S)


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
    assert rig.observed == [0, 1]


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
    assert "no step result for" in rig.losses.get(timeout=PATIENCE_S)[1]
    rig.loop.stop()


def test_jobs_that_run_at_the_stop_fail(rig: Rig) -> None:
    rig.attach()
    rig.submit(job("a", tokens=5))
    rig.next_plan()
    rig.loop.stop()
    assert isinstance(failures(rig.next_news())["a"], NotReady)
