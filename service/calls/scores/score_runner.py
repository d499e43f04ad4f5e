"""Run one Score call: tokenise, plan, compute, answer."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.scores.score_answer import score_response
from stemserve.service.calls.scores.score_encoder import ScoreEncoder
from stemserve.service.calls.scores.score_parts import ScoreParts
from stemserve.service.calls.scores.scoring import ScorePlan, nothing_read, plan_score, score_job
from stemserve.service.engine import Engine
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.request import JobTiming, ScoreJob, ScorePart, ScoreResult

ANSWER_S = 0.05  # what a partial answer needs to reach its caller before the deadline
CLOCK_TOLERANCE_S = 0.01  # gRPC ends a call by its own clock


class ScoreRunner:
    def __init__(self, encoder: ScoreEncoder, engine: Engine, metrics: Metrics) -> None:
        self._encoder = encoder
        self._engine = engine
        self._metrics = metrics
        self._numbers = count()

    async def run(
        self, request: inference_pb2.ScoreRequest, *, caller: Caller, deadline: float | None
    ) -> inference_pb2.ScoreResponse:
        """Raises RequestError."""
        started, phase = time.monotonic(), "queued"
        try:
            plan = plan_score(await self._encoder.encode(request, caller))
            tokenized, phase = time.monotonic(), "prefill"
            result = await self._compute(plan, deadline)
        except asyncio.CancelledError:
            self._metrics.cancelled(phase, by_deadline=passed(deadline))
            raise
        response = score_response(plan, result)
        self._count_later(plan, result)
        response.timing.CopyFrom(
            timing_message(result.timing, started=started, tokenized=tokenized)
        )
        return response

    async def run_parts(
        self,
        request: inference_pb2.ScoreRequest,
        *,
        most_items: int,
        caller: Caller,
        deadline: float | None,
    ) -> AsyncGenerator[inference_pb2.ScoreResponse, None]:
        """Answers of at most that many items; the last has the usage and the timing.

        Raises RequestError. Closing it cancels the engine's job.
        """
        started, phase = time.monotonic(), "queued"
        try:
            call = await self._encoder.encode(request, caller, most_items=most_items)
            plan = plan_score(call)
            tokenized, phase = time.monotonic(), "prefill"
            parts = ScoreParts(plan, most_items)
            async with aclosing(self._compute_parts(plan, deadline)) as news:
                async for part in news:
                    if isinstance(part, ScorePart):
                        for message in parts.add(part):
                            yield message
                        continue
                    self._count(plan, part)
                    for message in parts.finish(part):
                        if message.HasField("usage"):
                            message.timing.CopyFrom(
                                timing_message(part.timing, started=started, tokenized=tokenized)
                            )
                        yield message
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.cancelled(phase, by_deadline=passed(deadline))
            raise

    async def job(self, request: inference_pb2.ScoreRequest, *, caller: Caller) -> ScoreJob:
        """What `run` would compute."""
        plan = plan_score(await self._encoder.encode(request, caller))
        return self._job(plan, deadline=None)

    async def _compute(self, plan: ScorePlan, deadline: float | None) -> ScoreResult:
        if not len(plan.rows.items):
            return nothing_read(plan.call)
        return await self._engine.score(self._job(plan, deadline))

    async def _compute_parts(
        self, plan: ScorePlan, deadline: float | None
    ) -> AsyncGenerator[ScorePart | ScoreResult, None]:
        if not len(plan.rows.items):
            yield nothing_read(plan.call)
            return
        job = self._job(plan, deadline, parts=True)
        async with aclosing(self._engine.score_parts(job)) as news:
            async for part in news:
                yield part

    def _job(self, plan: ScorePlan, deadline: float | None, *, parts: bool = False) -> ScoreJob:
        # The client's id need not be unique.
        request_id = f"score-{next(self._numbers)}:{plan.call.request.request_id}"
        if plan.call.request.partial_results and deadline is not None:
            deadline -= ANSWER_S
        return score_job(plan, request_id=request_id, deadline=deadline, parts=parts)

    def _count_later(self, plan: ScorePlan, result: ScoreResult) -> None:
        """Once the answer is on its way."""
        asyncio.get_running_loop().call_soon(self._count, plan, result)

    def _count(self, plan: ScorePlan, result: ScoreResult) -> None:
        request, items = plan.call.request, len(plan.rows.items)
        self._metrics.queued("score", request.priority, result.timing)
        self._metrics.scored(request.WhichOneof("mode") or "", items, result.timing)
        context_tokens = sum(map(len, plan.call.contexts))
        self._metrics.used(result.usage, looked_up_tokens=context_tokens)


def passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() + CLOCK_TOLERANCE_S >= deadline


def timing_message(timing: JobTiming, *, started: float, tokenized: float) -> inference_pb2.Timing:
    return inference_pb2.Timing(
        total_seconds=time.monotonic() - started,
        tokenize_seconds=tokenized - started,
        queue_seconds=timing.queue_s,
        engine_seconds=timing.engine_s,
    )
