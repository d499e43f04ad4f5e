"""The Inference service."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import grpc

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.call_facts import current_call
from stemserve.service.caller import current_caller
from stemserve.service.calls.generation.generate_runner import GenerateRunner
from stemserve.service.calls.scores.score_runner import ScoreRunner
from stemserve.service.calls.scores.score_stream import Requests, ScoreStreamCalls
from stemserve.service.errors import InvalidRequest, RequestError
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving.call_status import Context, remaining_deadline
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.serving.status import status_code
from stemserve.service.tracing.call_notes import (
    note_generate,
    note_generate_answer,
    note_score,
    note_score_answer,
)

SCORE = "/stemserve.v1.Inference/Score"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        score: ScoreRunner,
        generate: GenerateRunner,
        metrics: Metrics,
        *,
        max_stream_calls: int,
        watch: CallWatch,
    ) -> None:
        self._score = score
        self._generate = generate
        self._metrics = metrics
        self._max_stream_calls = max_stream_calls
        self._watch = watch

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        deadline = remaining_deadline(context)
        trace = current_call().trace
        if trace is not None:
            note_score(trace, request)
        answer = await self._score.run(request, caller=current_caller(), deadline=deadline)
        if trace is not None:
            note_score_answer(trace, answer)
        return answer

    async def ScoreStream(
        self, request_iterator: Requests, context: Context
    ) -> AsyncGenerator[inference_pb2.ScoreStreamResponse, None]:
        score = partial(self._score_of_stream, context=context)
        calls = ScoreStreamCalls(score, max_calls=self._max_stream_calls)
        async with aclosing(calls.answers(request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        deadline = remaining_deadline(context)
        trace = current_call().trace
        if trace is not None:
            note_generate(trace, request)
        run = self._generate.run(request, caller=current_caller(), deadline=deadline)
        async with aclosing(run) as messages:
            async for message in messages:
                if trace is not None:
                    note_generate_answer(trace, message, time.monotonic())
                yield message

    async def _score_of_stream(
        self, message: inference_pb2.ScoreStreamRequest, *, context: Context
    ) -> AsyncGenerator[inference_pb2.ScoreResponse, None]:
        """Counted as a Score call."""
        started, code, fault = time.monotonic(), grpc.StatusCode.INTERNAL, None
        self._watch.begin_on_stream(SCORE, context)
        trace = current_call().trace
        if trace is not None:
            note_score(trace, message.request)
        try:
            async with aclosing(self._parts(message, remaining_deadline(context))) as parts:
                async for part in parts:
                    if trace is not None:
                        note_score_answer(trace, part)
                    yield part
            code = grpc.StatusCode.OK
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except RequestError as error:
            code, fault = status_code(error), error
            self._metrics.rejected(error)
            raise
        finally:
            seconds = time.monotonic() - started
            self._metrics.finished("score", code.name, seconds)
            self._watch.end(code.name, seconds, fault)

    async def _parts(
        self, message: inference_pb2.ScoreStreamRequest, deadline: float | None
    ) -> AsyncGenerator[inference_pb2.ScoreResponse, None]:
        request, caller = message.request, current_caller()
        if not message.stream_items:
            yield await self._score.run(request, caller=caller, deadline=deadline)
            return
        if request.top_n:
            raise InvalidRequest("stream_items", "cannot be given together with top_n")
        run = self._score.run_parts(
            request, most_items=message.stream_items, caller=caller, deadline=deadline
        )
        async with aclosing(run) as parts:
            async for part in parts:
                yield part
