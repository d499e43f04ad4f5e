"""The whole engine in one thread: the public calls, the batcher and the model, without sockets."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.batching.explain_plan import ExplainedPlan
from stemserve.service.caller import ANYONE
from stemserve.service.calls.context_encoder import ContextEncoder
from stemserve.service.calls.generate_runner import GenerateRunner
from stemserve.service.calls.generation import GenerateEncoder
from stemserve.service.calls.prefix_registry import PrefixRegistry, RegistryBounds
from stemserve.service.calls.request_constraints import RequestConstraints
from stemserve.service.calls.score_encoder import ScoreEncoder
from stemserve.service.calls.score_runner import ScoreRunner
from stemserve.service.calls.trie_parts import TrieParts
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.errors import RequestError
from stemserve.service.limits import Limits
from stemserve.service.metrics import Metrics
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
from stemserve.service.text.tokenizer import Tokenizer, TokenizerPool
from stemserve.service.workers.part_stream import PartStream
from stemserve.service.workers.token_stream import TokenStream
from stemserve.worker.config import parse_config
from stemserve.worker.runner import ModelRunner
from stemserve.worker.start import make_parts

STEPS_IN_FLIGHT = 2
COST_TABLE = Path(__file__).parents[2] / "kernels" / "costs" / "cpu.json"

Request = inference_pb2.ScoreRequest | inference_pb2.GenerateRequest


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


@dataclass(kw_only=True)
class Generated:
    """All messages of a Generate call joined, by sample."""

    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    text: dict[int, str] = field(default_factory=dict[int, str])
    finish: dict[int, int] = field(default_factory=dict[int, int])
    logprobs: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    top: dict[int, list[dict[int, float]]] = field(
        default_factory=dict[int, list[dict[int, float]]]
    )
    asked: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    prompt_logprobs: list[float] = field(default_factory=list[float])
    scores: dict[int, float] = field(default_factory=dict[int, float])
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        for at, sample in enumerate(message.sample_index):
            assert sample not in self.finish, "news of a sample that has ended"
            start, end = message.token_offsets[at : at + 2]
            self.tokens.setdefault(sample, []).extend(message.token_ids[start:end])
            self.text[sample] = self.text.get(sample, "") + message.text[at]
            self.logprobs.setdefault(sample, []).extend(message.logprobs[start:end])
            self.top.setdefault(sample, []).extend(
                {token.token_id: token.logprob for token in top.tokens}
                for top in message.top_logprobs[start:end]
            )
            if message.asked_logprobs:
                rows = np.array(message.asked_logprobs).reshape(len(message.token_ids), -1)
                self.asked.setdefault(sample, []).extend(rows[start:end].tolist())
            if message.beam_scores:
                self.scores[sample] = message.beam_scores[at]
            if message.finish_reason[at]:
                self.finish[sample] = message.finish_reason[at]
        self.prompt_logprobs += message.prompt_logprobs
        if message.HasField("usage"):
            self.usage = message.usage


Answer = inference_pb2.ScoreResponse | Generated | RequestError


class InProcessEngine:
    """Step k + 1 is planned before the result of step k is taken, as over a stream."""

    def __init__(self, worker: InProcessWorker, batcher: Batcher, metrics: Metrics) -> None:
        self.facts = worker.facts
        self.results: list[worker_pb2.StepResult] = []
        self.plans: list[worker_pb2.StepPlan] = []
        self._runner = worker.runner
        self._batcher = batcher
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


class EngineRig:
    """Takes the messages that clients send, gives the answers that they get."""

    def __init__(
        self, worker: InProcessWorker, tokenizer: Tokenizer, *, max_step_tokens: int = 512
    ) -> None:
        facts, limits = worker.facts, Limits(max_step_tokens=max_step_tokens)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        bounds = BatcherLimits(max_step_tokens=max_step_tokens)
        self.batcher = Batcher(facts, bounds, clock=time.monotonic)
        self.engine = InProcessEngine(worker, self.batcher, metrics)
        self._executor = ThreadPoolExecutor(1)
        pool = TokenizerPool(tokenizer, self._executor, long_executor=self._executor)
        prefixes = PrefixRegistry(RegistryBounds(), clock=time.monotonic)
        contexts = ContextEncoder(pool, prefixes, vocab_size=facts.vocab_size, limits=limits)
        self._score = ScoreRunner(ScoreEncoder(contexts, pool, limits, facts), self.engine, metrics)
        compiler = ConstraintCompiler(
            tokenizer,
            self._executor,
            metrics,
            vocab_size=facts.vocab_size,
            max_compile_ms=limits.max_compile_ms,
        )
        self.tries = TrieParts(pool, facts, limits, compiler, metrics)
        constraints = RequestConstraints(
            compiler,
            self.tries.builder,
            self.tries.registry,
            metrics,
            vocab_size=facts.vocab_size,
        )
        self._generate = GenerateRunner(
            GenerateEncoder(contexts, tokenizer.eos_ids, limits, facts, constraints),
            tokenizer,
            self.engine,
            metrics,
            entropy=lambda: secrets.randbits(64),
        )

    @property
    def groups(self) -> list[worker_pb2.GroupReport]:
        """Of all steps that ran, in order."""
        return [group for result in self.engine.results for group in result.groups]

    async def run(self, *requests: Request) -> list[Answer]:
        """Answers of requests that arrive before the same step; refusals too are answers."""
        calls = [asyncio.create_task(self._call(request)) for request in requests]
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)  # encoders and readers of streams go on
            if self.engine.num_calls + sum(call.done() for call in calls) == len(calls):
                self.engine.turn()
        while self.engine.turn():
            pass  # rows of samples that had stopped
        return [call.result() for call in calls]

    async def score(self, request: inference_pb2.ScoreRequest) -> inference_pb2.ScoreResponse:
        (answer,) = await self.run(request)
        assert isinstance(answer, inference_pb2.ScoreResponse), answer
        return answer

    async def generate(self, request: inference_pb2.GenerateRequest) -> Generated:
        (answer,) = await self.run(request)
        assert isinstance(answer, Generated), answer
        return answer

    def close(self) -> None:
        """Raises RuntimeError unless every page is free or cached and nothing is left."""
        self._executor.shutdown()
        self.batcher.check_idle()

    async def _call(self, request: Request) -> Answer:
        try:
            if isinstance(request, inference_pb2.ScoreRequest):
                return await self._score.run(request, caller=ANYONE, deadline=None)
            generated = Generated()
            async for message in self._generate.run(request, caller=ANYONE, deadline=None):
                generated.add(message)
            return generated
        except RequestError as error:
            return error
