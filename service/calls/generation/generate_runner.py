"""Run one Generate call: tokenise, follow the engine's tokens, stream their text."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.generation.generate_answer import GenerateAnswer, sample_texts
from stemserve.service.calls.generation.generation import GenerateEncoder
from stemserve.service.calls.generation.stop_watch import StopWatch
from stemserve.service.calls.scores.score_runner import passed, timing_message
from stemserve.service.engine import Engine
from stemserve.service.errors import EngineFault
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.request import GenerateChunk, GenerateJob, SampleTokens
from stemserve.service.stream_pace import StreamPace
from stemserve.service.text.tokenizer import Tokenizer

Messages = AsyncGenerator[inference_pb2.GenerateResponse, None]


class GenerateRunner:
    def __init__(
        self,
        encoder: GenerateEncoder,
        tokenizer: Tokenizer,
        engine: Engine,
        metrics: Metrics,
        *,
        entropy: Callable[[], int],
    ) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._engine = engine
        self._metrics = metrics
        self._entropy = entropy
        self._numbers = count()

    async def job(
        self, request: inference_pb2.GenerateRequest, *, caller: Caller, deadline: float | None
    ) -> GenerateJob:
        # The client's id need not be unique.
        request_id = f"generate-{next(self._numbers)}:{request.request_id}"
        job = await self._encoder.encode(
            request, caller, request_id=request_id, entropy=self._entropy()
        )
        return replace(job, deadline=deadline)

    async def run(
        self, request: inference_pb2.GenerateRequest, *, caller: Caller, deadline: float | None
    ) -> Messages:
        """Raises RequestError. Closing it cancels the engine's job."""
        call = _RunningCall()
        try:
            job = await self.job(request, caller=caller, deadline=deadline)
            call.tokenized, call.phase = time.monotonic(), "prefill"
            async with aclosing(self._follow(request, job, call)) as messages:
                async for message in messages:
                    yield message
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.cancelled(call.phase, by_deadline=passed(deadline))
            raise

    async def _follow(
        self, request: inference_pb2.GenerateRequest, job: GenerateJob, call: "_RunningCall"
    ) -> Messages:
        answer = GenerateAnswer(request, self._tokenizer.token_bytes, job.num_samples)
        pace, last = self._pace(request, job), None
        async with aclosing(self._engine.generate(job, pace)) as chunks:
            async for chunk in chunks:
                call.note(chunk, job.num_samples)
                message = answer.add(chunk)
                if message is None:
                    continue
                if chunk.usage is not None:
                    last = chunk
                    self._finish(message, job, call, last)
                self._metrics.message_sent(pace)
                yield message
        if last is None:
            raise EngineFault("the engine ended a stream without its usage")

    def _pace(self, request: inference_pb2.GenerateRequest, job: GenerateJob) -> StreamPace:
        if not request.stop:
            return StreamPace(least_tokens=request.stream_interval)
        watch = StopWatch(
            sample_texts(request, self._tokenizer.token_bytes, job.num_samples),
            stop=partial(self._engine.stop_sample, job.request_id),
        )
        return StreamPace(least_tokens=request.stream_interval, completes=watch.completes)

    def _finish(
        self,
        message: inference_pb2.GenerateResponse,
        job: GenerateJob,
        call: "_RunningCall",
        last: GenerateChunk,
    ) -> None:
        if last.timing is not None:
            message.timing.CopyFrom(
                timing_message(last.timing, started=call.started, tokenized=call.tokenized)
            )
            self._metrics.queued("generate", job.priority, last.timing)
        if last.usage is not None:
            self._metrics.used(last.usage, looked_up_tokens=len(job.prompt))
            if call.token_times:
                first_s = call.token_times[0] - call.started
                self._metrics.first_token(last.usage, len(job.prompt), first_s)
        self._metrics.streamed(call.gaps())


class _RunningCall:
    """When what happened."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.tokenized = self.started
        self.phase = "queued"
        self.token_times: list[float] = []  # of chunks
        self._steps: list[int] = []  # that each of them is of

    def note(self, chunk: GenerateChunk, samples: int) -> None:
        if chunk.news:
            self.phase = "decode"
            self.token_times.append(time.monotonic())
            self._steps.append(chunk.num_tokens if samples == 1 else _most_tokens(chunk.news))

    def gaps(self) -> list[tuple[float, int]]:
        """Seconds from chunk to chunk, and of how many steps the later one is."""
        times = self.token_times
        seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
        return list(zip(seconds, self._steps[1:], strict=True))


def _most_tokens(news: Sequence[SampleTokens]) -> int:
    """Of one sample."""
    counts: Counter[int] = Counter()
    for tokens in news:
        counts[tokens.sample] += len(tokens.token_ids)
    return max(counts.values())
