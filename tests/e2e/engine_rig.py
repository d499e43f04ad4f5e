"""The whole engine in one thread: the public calls, the batcher and the model, without sockets."""

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry
from tests.e2e.in_process_engine import InProcessEngine, InProcessWorker

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.batching.mask_work import Run
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.caller import ANYONE
from stemserve.service.calls.context_encoder import ContextEncoder
from stemserve.service.calls.generation.generate_runner import GenerateRunner
from stemserve.service.calls.generation.generation import GenerateEncoder
from stemserve.service.calls.generation.request_constraints import RequestConstraints
from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry, RegistryBounds
from stemserve.service.calls.scores.score_encoder import ScoreEncoder
from stemserve.service.calls.scores.score_runner import ScoreRunner
from stemserve.service.calls.tries.trie_parts import TrieParts
from stemserve.service.constraints.compile_queue import CompileQueue
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.errors import RequestError
from stemserve.service.limits import Limits
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.text.tokenizer import Tokenizer, TokenizerPool

Request = inference_pb2.ScoreRequest | inference_pb2.GenerateRequest


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


class EngineRig:
    """Takes the messages that clients send, gives the answers that they get."""

    def __init__(
        self,
        worker: InProcessWorker,
        tokenizer: Tokenizer,
        *,
        max_step_tokens: int = 512,
        drafts: DraftPolicy | None = None,
    ) -> None:
        facts, limits = worker.facts, Limits(max_step_tokens=max_step_tokens)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        bounds = BatcherLimits(max_step_tokens=max_step_tokens, drafts=drafts or DraftPolicy())

        def make_batcher(run_aside: Run) -> Batcher:
            return Batcher(facts, bounds, clock=time.monotonic, run_aside=run_aside)

        self.engine = InProcessEngine(worker, make_batcher, metrics)
        self.batcher = self.engine.batcher
        self._executor = ThreadPoolExecutor(1)
        pool = TokenizerPool(tokenizer, self._executor, long_executor=self._executor)
        prefixes = PrefixRegistry(RegistryBounds(), clock=time.monotonic)
        contexts = ContextEncoder(pool, prefixes, vocab_size=facts.vocab_size, limits=limits)
        self._score = ScoreRunner(ScoreEncoder(contexts, pool, limits, facts), self.engine, metrics)
        compiler = ConstraintCompiler(
            tokenizer,
            CompileQueue(self._executor),
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
