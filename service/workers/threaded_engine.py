"""Give the servicers awaitable calls on the engine, which the step loop drives."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from typing import Any, TypeVar

from stemserve.proto.v1 import worker_pb2
from stemserve.service.call_facts import current_call
from stemserve.service.errors import NotReady, SlowReader
from stemserve.service.request import (
    Event,
    GenerateChunk,
    GenerateJob,
    Int32,
    Job,
    Load,
    Realm,
    ScoreJob,
    ScorePart,
    ScoreResult,
    WorkerFacts,
)
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers.message_clock import MessageClock
from stemserve.service.workers.part_stream import PartStream
from stemserve.service.workers.running_calls import RunningCalls
from stemserve.service.workers.step_commands import (
    Ask,
    Cancel,
    Inbox,
    StepBatcher,
    StopSample,
    Submit,
)
from stemserve.service.workers.token_stream import MAX_UNREAD_TOKENS, TokenStream

PREDICT_TIMEOUT_S = 30.0
FEW_CONTEXTS = 4  # each takes 0.07 ms to plan
FEW_CONTEXT_TOKENS = 8_192  # of all of them; 100,000 that are not cached take 9 ms
# That a job waits for others while a step runs; a result ends it.
GATHER_S = 0.002
REFUSE_S = 0.01  # where no step is planned before: it may be refused
MESSAGES_A_SECOND = 2_500  # of all streams; each costs this process some 60 us
LOADING = "the model is loading; retry in a moment"
DRAINING = "the server is shutting down; retry on another one"

Predict = Callable[[worker_pb2.StepPlan], worker_pb2.PredictResponse]
Prediction = tuple[worker_pb2.StepPlan, worker_pb2.PredictResponse, Int32]
T = TypeVar("T")


class ThreadedEngine:
    """Implements stemserve.service.engine.Engine. Made on the RPC loop, whose thread owns it.

    Only `deliver` is for all threads.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        max_stream_delay_s: float = 0.0,
        note_lost: Callable[[], object] = lambda: None,
    ) -> None:
        """`note_lost` hears of each call that ends because it could not take its news."""
        self._inbox = inbox
        self._max_unread_tokens = max_unread_tokens
        self._max_stream_delay_s = max_stream_delay_s
        self._clock = MessageClock(self._message_delay_s)
        self._loop = asyncio.get_running_loop()
        self._calls = RunningCalls(note_lost=note_lost)
        self._facts: WorkerFacts | None = None
        self._predict: Predict | None = None
        self._refusal: str | None = LOADING
        self._draining = False
        self._is_work_due = False  # for jobs that came while nothing ran
        self._is_work_long = False
        self._is_gathering = False  # jobs that came while a step runs
        self.generation = 0

    @property
    def facts(self) -> WorkerFacts:
        if self._facts is None:
            raise NotReady(LOADING)
        return self._facts

    @property
    def running_jobs(self) -> int:
        return len(self._calls)

    def admit(self, facts: WorkerFacts, predict: Predict) -> None:
        """A worker is attached: jobs are taken from now on."""
        self._facts = facts
        self._predict = predict
        self.generation += 1
        self._refusal = None

    def suspend(self, reason: str) -> None:
        """Refuse new jobs with NotReady until `admit`."""
        self._refusal = reason

    def drain(self) -> None:
        """Refuse new jobs for good; those that run go on."""
        self._draining = True

    async def score(self, job: ScoreJob) -> ScoreResult:
        future: asyncio.Future[ScoreResult] = self._loop.create_future()
        with self._registered(job, self._calls.scores, future):
            self._submit(job)
            return await future

    async def score_parts(self, job: ScoreJob) -> AsyncGenerator[ScorePart | ScoreResult, None]:
        stream = PartStream()
        with self._registered(job, self._calls.part_streams, stream):
            self._submit(job)
            while True:
                news = await stream.take()
                yield news
                if isinstance(news, ScoreResult):
                    return

    async def generate(
        self, job: GenerateJob, pace: StreamPace
    ) -> AsyncGenerator[GenerateChunk, None]:
        reader = asyncio.current_task()

        def cut(error: SlowReader) -> None:
            self._inbox.put(Cancel(request_id=job.request_id))
            if reader is not None:
                reader.cancel(error)  # whoever catches it finds the error as its argument

        stream = TokenStream(
            max_unread_tokens=self._max_unread_tokens,
            pace=pace,
            clock=self._clock,
            on_overflow=cut,
        )
        with self._registered(job, self._calls.streams, stream):
            self._submit(job)
            while True:
                chunk = await stream.take()
                yield chunk
                if chunk.usage is not None:
                    return

    def stop_sample(self, request_id: str, sample: int) -> None:
        self._inbox.put(StopSample(request_id=request_id, sample=sample))

    async def explain(self, job: Job) -> list[Prediction]:
        planned = await self._ask(lambda batcher: batcher.explain(job))
        predict = self._predict
        if predict is None:
            raise NotReady("no worker is ready; retry in a moment")
        predictions: list[Prediction] = []
        # Planning takes a while and the stub is synchronous: neither must hold up a loop.
        while step := await asyncio.to_thread(_next_prediction, planned, predict):
            predictions.append(step)
        return predictions

    async def check_rates(self, tenant: str, least_tokens: int) -> None:
        await self._ask(lambda batcher: batcher.check_rates(tenant, least_tokens))

    async def load(self) -> Load:
        return await self._ask(lambda batcher: batcher.load())

    async def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        return await self._ask(lambda batcher: batcher.pin(key, tokens, realm))

    async def unpin(self, key: str) -> None:
        await self._ask(lambda batcher: batcher.unpin(key))

    async def clear_cache(self) -> int:
        return await self._ask(lambda batcher: batcher.clear_cache())

    async def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        return await self._ask(lambda batcher: batcher.resident_tokens(tokens, realm))

    def deliver(self, events: list[Event]) -> None:
        """One wake-up of the RPC loop for all news of a step."""
        self._loop.call_soon_threadsafe(self._calls.dispatch, events)

    def _submit(self, job: Job) -> None:
        """Jobs of calls that come together are planned together. What may take long to plan is for
        the step loop's thread, not for this one: masks of a generation, many contexts or long
        ones, and what is planned beside running work."""
        trace = current_call().trace
        self._inbox.leave(Submit(job=job if trace is None else replace(job, trace=trace)))
        self._is_work_long = self._is_work_long or not _is_planned_at_once(job)
        if self._inbox.is_busy:
            if not self._is_gathering:
                self._is_gathering = True
                self._loop.call_later(self._gathering_s(), self._work_gathered)
        elif not self._is_work_due:
            self._is_work_due = True
            # Of all jobs: nothing that it logs belongs to the call that happens to bring it.
            self._loop.call_soon(self._work, context=Context())

    def _work(self) -> None:
        is_long, self._is_work_long, self._is_work_due = self._is_work_long, False, False
        if is_long:
            self._inbox.call()
        else:
            self._inbox.work(wait=False)

    def _gathering_s(self) -> float:
        """How long jobs wait for others while a step runs."""
        if self._inbox.is_full:
            return REFUSE_S
        until_s = self._inbox.gathers_until_s
        return min(REFUSE_S, max(GATHER_S, until_s - time.monotonic())) if until_s else GATHER_S

    def _work_gathered(self) -> None:
        """Beside generations, whose steps follow each other closely, planning is the thread's."""
        self._is_gathering = False
        if not self._inbox.has_commands:
            return
        if self._inbox.is_full or self._inbox.gathers_until_s:
            self._work()
        else:
            self._inbox.call()

    def _message_delay_s(self) -> float:
        """Between two messages of a stream, while there are as many streams as now."""
        return min(self._max_stream_delay_s, len(self._calls.streams) / MESSAGES_A_SECOND)

    async def _ask(self, question: Callable[[StepBatcher], T]) -> T:
        reply: Future[Any] = Future()
        self._inbox.put(Ask(question=question, reply=reply))
        answer: T = await asyncio.wrap_future(reply)
        return answer

    @contextmanager
    def _registered(self, job: Job, kind: dict[str, T], call: T) -> Generator[None]:
        """Events of the job reach `call` inside; leaving by an exception ends the job."""
        if self._draining:
            raise NotReady(DRAINING)
        if self._refusal is not None:
            raise NotReady(self._refusal)
        with self._calls.registered(job.request_id, kind, call):
            try:
                yield
            except BaseException:
                # The job's own failure too: the step loop ignores ids that it does not run.
                self._inbox.put(Cancel(request_id=job.request_id))
                raise


def _is_planned_at_once(job: Job) -> bool:
    if not isinstance(job, ScoreJob) or len(job.contexts) > FEW_CONTEXTS:
        return False
    return sum(map(len, job.contexts)) <= FEW_CONTEXT_TOKENS


def _next_prediction(
    planned: Iterator[tuple[worker_pb2.StepPlan, Int32]], predict: Predict
) -> Prediction | None:
    for plan, cached in planned:
        return plan, predict(plan), cached
    return None
