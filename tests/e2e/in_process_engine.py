"""The batcher and the model in one thread, behind the interface that the calls know."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.batcher import Batcher
from stemserve.service.batching.explain_plan import ExplainedPlan
from stemserve.service.batching.mask_work import Run
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.request import (
    Event,
    GenerateChunk,
    GenerateJob,
    Int32,
    Job,
    JobFailed,
    Load,
    Realm,
    ScoreJob,
    ScorePart,
    ScoreResult,
    WorkerFacts,
)
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers.part_stream import PartStream
from stemserve.service.workers.token_stream import TokenStream
from stemserve.worker.config import parse_config
from stemserve.worker.runner import ModelRunner
from stemserve.worker.start import make_parts

STEPS_IN_FLIGHT = 2
COST_TABLE = Path(__file__).parents[2] / "kernels" / "costs" / "cpu.json"


@dataclass(frozen=True, kw_only=True)
class InProcessWorker:
    """What `python -m stemserve.worker` serves, without its process."""

    runner: ModelRunner
    facts: WorkerFacts


def start_worker(
    model: Path,
    *,
    kv_pages: int,
    device: str = "cpu",
    dtype: str = "float32",
    flags: Sequence[str] = (),
) -> InProcessWorker:
    options = {
        "--listen": "unix:/unused",
        "--model": model,
        "--device": device,
        "--dtype": dtype,
        "--threads": 1,
        "--kv-pages": kv_pages,
        "--cost-table": COST_TABLE,
    }
    words = [*(str(word) for pair in options.items() for word in pair), *flags]
    parts = make_parts(parse_config(words), lambda done, total: None, lambda: None)
    described = {each.name: getattr(parts.facts, each.name) for each in fields(WorkerFacts)}
    described["class_labels"] = tuple(parts.facts.class_labels)
    return InProcessWorker(runner=parts.runner, facts=WorkerFacts(**described))


class InProcessEngine:
    """Step k + 1 is planned before the result of step k is taken, as over a stream."""

    def __init__(
        self, worker: InProcessWorker, make_batcher: Callable[[Run], Batcher], metrics: Metrics
    ) -> None:
        self.facts = worker.facts
        self.results: list[worker_pb2.StepResult] = []
        self.plans: list[worker_pb2.StepPlan] = []
        self._runner = worker.runner
        self._late = deque[Callable[[], None]]()  # masks that the batcher has to wait for
        self.batcher = self._batcher = make_batcher(self._put_off)
        self.generation = 1
        self._metrics = metrics
        self._in_flight: deque[worker_pb2.StepPlan] = deque()
        self._poisoned: Int32 = np.empty(0, np.int32)
        self._scores: dict[str, asyncio.Future[ScoreResult]] = {}
        self._part_streams: dict[str, PartStream] = {}
        self._streams: dict[str, TokenStream] = {}

    @property
    def num_calls(self) -> int:
        return len(self._scores) + len(self._part_streams) + len(self._streams)

    async def score(self, job: ScoreJob) -> ScoreResult:
        self._batcher.submit(job)
        self._scores[job.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._scores[job.request_id]
        finally:
            del self._scores[job.request_id]

    async def score_parts(self, job: ScoreJob) -> AsyncGenerator[ScorePart | ScoreResult, None]:
        self._batcher.submit(job)
        stream = self._part_streams[job.request_id] = PartStream()
        try:
            while True:
                news = await stream.take()
                yield news
                if isinstance(news, ScoreResult):
                    return
        finally:
            del self._part_streams[job.request_id]

    async def generate(
        self, job: GenerateJob, pace: StreamPace
    ) -> AsyncGenerator[GenerateChunk, None]:
        self._batcher.submit(job)
        self._streams[job.request_id] = TokenStream(pace=pace)
        try:
            while True:
                chunk = await self._streams[job.request_id].take()
                yield chunk
                if chunk.usage is not None:
                    return
        finally:
            del self._streams[job.request_id]

    def stop_sample(self, request_id: str, sample: int) -> None:
        self._batcher.stop_sample(request_id, sample)

    async def explain(
        self, job: Job
    ) -> list[tuple[worker_pb2.StepPlan, worker_pb2.PredictResponse, Int32]]:
        explained: list[ExplainedPlan] = list(self._batcher.explain(job))
        return [(plan, self._runner.predict(plan), cached) for plan, cached in explained]

    async def check_rates(self, tenant: str, least_tokens: int) -> None:
        self._batcher.check_rates(tenant, least_tokens)

    async def load(self) -> Load:
        return self._batcher.load()

    async def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        return self._batcher.pin(key, tokens, realm)

    async def unpin(self, key: str) -> None:
        self._batcher.unpin(key)

    async def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        return self._batcher.resident_tokens(tokens, realm)

    def _put_off(self, work: Callable[[], None], *, slow: bool) -> None:
        self._late.append(work)

    def turn(self) -> bool:
        """Fill the steps in flight and run the oldest; whether there was anything to do."""
        while len(self._in_flight) < STEPS_IN_FLIGHT:
            plan = self._batcher.plan_step()
            if plan is None:
                break
            self.plans.append(plan)
            self._in_flight.append(plan)
        events = self._batcher.take_events()
        ran = bool(self._in_flight)
        if ran:
            self._poison_free_pages()
            result = self._runner.step(self._in_flight.popleft())
            self.results.append(result)
            events += self._batcher.apply(result)
            self._metrics.observe_step(result, self._batcher.load())
        self._deliver(events)
        if self._late and (not ran or len(self.plans) % 3 == 0):
            self._late.popleft()()
            return True
        return ran or bool(events)

    def _poison_free_pages(self) -> None:
        """Whatever reads a page that nobody holds reads NaN."""
        pool = self._runner._pool  # pyright: ignore[reportPrivateUsage]
        allocator = self._batcher._cache.allocator  # pyright: ignore[reportPrivateUsage]
        free = np.array([p for p in range(allocator.num_pages) if allocator.is_free(p)], np.int32)
        pool.poison(np.setdiff1d(free, self._poisoned))
        self._poisoned = free

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ScoreResult():
                    if event.request_id in self._part_streams:
                        self._part_streams[event.request_id].finish(event)
                    else:
                        self._scores[event.request_id].set_result(event)
                case ScorePart():
                    self._part_streams[event.request_id].put(event)
                case GenerateChunk():
                    self._streams[event.request_id].put(event)
                case JobFailed():
                    if event.request_id in self._streams:
                        self._streams[event.request_id].fail(event.error)
                    elif event.request_id in self._part_streams:
                        self._part_streams[event.request_id].fail(event.error)
                    else:
                        self._scores[event.request_id].set_exception(event.error)
