"""Calls on the engine from the RPC loop: who gets which news."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from tests.service.step_loop_rig import facts
from tests.service.supervisor_rig import generate_job

from stemserve.proto.v1 import worker_pb2
from stemserve.service.errors import EngineFault
from stemserve.service.request import (
    GenerateChunk,
    GenerateJob,
    JobUsage,
    SampleTokens,
)
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers.step_commands import Cancel, Inbox
from stemserve.service.workers.threaded_engine import ThreadedEngine


def predict(plan: worker_pb2.StepPlan) -> worker_pb2.PredictResponse:
    return worker_pb2.PredictResponse()


def fails_at(token: int) -> Callable[[GenerateChunk], bool]:
    """What looks at a call's tokens, and cannot take one of them."""

    def completes(chunk: GenerateChunk) -> bool:
        if any(token in news.token_ids for news in chunk.news):
            raise ZeroDivisionError(f"token {token}")
        return False

    return completes


async def read(engine: ThreadedEngine, job: GenerateJob, pace: StreamPace) -> list[int]:
    return [
        token
        async for chunk in engine.generate(job, pace)
        for news in chunk.news
        for token in news.token_ids
    ]


def news_of(job: GenerateJob, token: int, *, last: bool) -> GenerateChunk:
    usage = JobUsage() if last else None
    return GenerateChunk(job.request_id, [SampleTokens(0, [token], [-1.0])], usage)


async def test_news_that_a_call_cannot_take_end_it_and_reach_all_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox, lost = Inbox(), list[None]()
    engine = ThreadedEngine(inbox, note_lost=lambda: lost.append(None))
    engine.admit(facts(), predict)
    jobs = [generate_job() for _ in range(3)]
    paces = [StreamPace(), StreamPace(completes=fails_at(2)), StreamPace()]
    readers = [
        asyncio.create_task(read(engine, job, pace)) for job, pace in zip(jobs, paces, strict=True)
    ]
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        for token in (1, 2, 3):
            engine.deliver([news_of(job, token, last=token == 3) for job in jobs])
        answers = await asyncio.gather(*readers, return_exceptions=True)
    assert answers[0] == answers[2] == [1, 2, 3]
    assert isinstance(answers[1], EngineFault) and "token 2" in str(answers[1])
    # The one more that came behind it is not delivered, and does not count.
    assert len(lost) == 1 and jobs[1].request_id in caplog.text
    commands = iter(inbox.next, None)
    assert Cancel(request_id=jobs[1].request_id) in list(commands)
