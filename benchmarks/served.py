"""Our side of a comparison: timed calls of a running server through the client library."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from workloads import Int32, ScoreWorkload

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import Client, Scores, token_blob

Context = inference_pb2.Context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    token_ids: Int32  # [tokens, samples]
    logprobs: NDArray[np.float32]  # [tokens, samples]
    seconds_per_token: float  # from the message with the first tokens to the one with the last


@dataclass(frozen=True, slots=True)
class Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Served:
    """A client with an event loop of its own, so that a benchmark reads as plain calls."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.Runner()
        self._client = self._loop.run(self._connect(address))

    def register(self, prefix: Int32, *, warm: bool = True) -> Context:
        request = prefixes_pb2.RegisterRequest(tokens=token_blob(prefix), warm=warm)
        registered = self._loop.run(self._client.register(request))
        return Context(prefix_id=registered.prefix_id)

    def label_probabilities(
        self, workload: ScoreWorkload, context: Context | None = None
    ) -> tuple[Scores, float]:
        """Without a context, the workload's prefix is sent with the call."""
        context = context or Context(tokens=token_blob(workload.prefix))
        mode = inference_pb2.LabelProbabilities(label_token_ids=workload.label_ids)
        return self._timed(
            self._client.score_tokens(list(workload.items), mode, contexts=[context])
        )

    def log_likelihoods(self, items: Sequence[Int32], context: Context) -> tuple[Scores, float]:
        mode = inference_pb2.LogLikelihood(token_logprobs=True)
        return self._timed(self._client.score_tokens(items, mode, contexts=[context]))

    def register_text(self, text: str) -> str:
        request = prefixes_pb2.RegisterRequest(text=text, warm=True)
        return self._loop.run(self._client.register(request)).prefix_id

    def rank(self, query: str, prefix_ids: Sequence[str]) -> Scores:
        scores, _ = self._timed(self._client.rank(query, prefix_ids))
        return scores

    def choose(self, questions: Sequence[str], labels: Sequence[str], document: str) -> Scores:
        """Probabilities of the labels after document + question, a row a question."""
        mode = inference_pb2.LabelProbabilities(labels=labels)
        scores, _ = self._timed(
            self._client.score(questions, mode, contexts=[Context(text=document)])
        )
        return scores

    def generate(self, request: inference_pb2.GenerateRequest) -> Generated:
        return self._loop.run(self._generate(request))

    def _timed(self, call: Coroutine[Any, Any, Scores]) -> tuple[Scores, float]:
        started = time.perf_counter()
        scores = self._loop.run(call)
        seconds = time.perf_counter() - started
        if scores.errors:
            raise RuntimeError(f"item {scores.errors[0].index}: {scores.errors[0].message}")
        return scores, seconds

    async def _connect(self, address: str) -> Client:
        return Client(address)

    async def _generate(self, request: inference_pb2.GenerateRequest) -> Generated:
        samples = [Sample() for _ in range(request.n)]
        arrivals: list[float] = []
        async for step in self._client.generate(request):
            if step.news:
                arrivals.append(time.perf_counter())
            for news in step.news:
                samples[news.sample].token_ids.extend(news.token_ids)
                samples[news.sample].logprobs.extend(news.logprobs)
        token_ids = np.array([sample.token_ids for sample in samples], np.int32).T
        if len(token_ids) != len(arrivals):
            raise RuntimeError(f"{len(token_ids)} tokens a sample came in {len(arrivals)} messages")
        return Generated(
            token_ids=token_ids,
            logprobs=np.array([sample.logprobs for sample in samples], np.float32).T,
            seconds_per_token=(arrivals[-1] - arrivals[0]) / (len(arrivals) - 1),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.run(self._client.close())
        self._loop.close()
