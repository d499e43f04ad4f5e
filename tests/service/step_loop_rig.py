"""A step loop with a batcher that only counts, and a worker that answers when told."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.errors import QueueFull
from stemserve.service.request import (
    Event,
    GenerateChunk,
    GenerateJob,
    Int32,
    Job,
    JobUsage,
    Load,
    Realm,
    SampleTokens,
    WorkerFacts,
)
from stemserve.service.workers.step_commands import (
    Ask,
    Attach,
    Inbox,
    Result,
    Submit,
)
from stemserve.service.workers.step_loop import StepLoop
from stemserve.service.workers.watchdog import StepTimeout

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
        self.may_gather = False

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
        rows = np.zeros(len(ready), np.int32).tobytes()
        return worker_pb2.StepPlan(step_id=len(self.steps) - 1, token_ids=rows)

    def apply(self, result: worker_pb2.StepResult) -> list[Event]:
        events: list[Event] = []
        for name in self.steps[result.step_id]:
            if name not in self.jobs:
                continue
            self.done[name] += 1
            last = self.done[name] == self._length(name)
            tokens = SampleTokens(0, [result.step_id], [0.0])
            usage = JobUsage() if last else None
            events.append(GenerateChunk(request_id=name, news=[tokens], usage=usage))
            if last:
                del self.jobs[name]
        return events

    def take_events(self) -> list[Event]:
        """As the batcher ends late jobs without a step."""
        return [self.late.pop()] if self.late else []

    @property
    def has_work(self) -> bool:
        return any(self.planned[name] < self._length(name) for name in self.jobs)

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

    def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        return 0

    def expire(self) -> list[Event]:
        return []

    def check_rates(self, tenant: str, least_tokens: int) -> None:
        raise AssertionError("nobody asked for it")

    def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        return 0

    def unpin(self, key: str) -> None:
        pass

    def clear_cache(self) -> int:
        raise AssertionError("nobody asked for it")

    def _length(self, name: str) -> int:
        found = self.jobs[name]
        assert isinstance(found, GenerateJob)
        return found.max_new_tokens


class Rig:
    """A running step loop with all its ends in the test's hands."""

    def __init__(self, *, step_timeout_s: float = 60.0) -> None:
        self.inbox = Inbox()
        self.plans: queue.SimpleQueue[worker_pb2.StepPlan] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.losses: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.observed: list[int] = []
        self.fault_of_observer: Exception | None = None
        self.senders: list[str] = []  # threads that sent plans
        self.batchers: list[CountingBatcher] = []
        self.loop = StepLoop(
            self.inbox,
            make_batcher=self._make_batcher,
            observe=self._observe,
            step_timeout=StepTimeout(least_s=step_timeout_s, most_s=step_timeout_s),
        )
        self.loop.start(deliver=self.news.put, worker_lost=self._note_loss)

    def _note_loss(self, generation: int, reason: str) -> None:
        self.losses.put((generation, reason))

    def _observe(self, result: worker_pb2.StepResult, load: Load) -> None:
        if self.fault_of_observer is not None:
            raise self.fault_of_observer
        self.observed.append(result.step_id)

    def _make_batcher(self, facts: WorkerFacts) -> CountingBatcher:
        self.batchers.append(CountingBatcher(facts))
        return self.batchers[-1]

    def send(self, plan: worker_pb2.StepPlan) -> None:
        self.senders.append(threading.current_thread().name)
        self.plans.put(plan)

    def attach(self, generation: int = 1, steps_in_flight: int = 2) -> None:
        self.inbox.put(Attach(generation=generation, worker=self, facts=facts(steps_in_flight)))

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.inbox.put(Submit(job=job))

    def next_plan(self) -> int:
        return self.plans.get(timeout=PATIENCE_S).step_id

    def answer(self, step_id: int, generation: int = 1, *, seconds: float = 0.0) -> None:
        result = worker_pb2.StepResult(step_id=step_id, step_seconds=seconds)
        self.inbox.put(Result(generation=generation, result=result))

    def next_news(self) -> list[Event]:
        return self.news.get(timeout=PATIENCE_S)

    def ask(self, question: Callable[[Any], Any]) -> Any:
        reply: Future[Any] = Future()
        self.inbox.put(Ask(question=question, reply=reply))
        return reply.result(PATIENCE_S)
