"""ScoreStream through a real socket."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine
from tests.service.serving import serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import token_blob
from stemserve.service.client_errors import ClientError
from stemserve.service.client_results import Scores
from stemserve.service.limits import Limits
from stemserve.service.request import Int32

LIKELIHOOD = inference_pb2.LogLikelihood()


def ids(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def blob(*tokens: int) -> bytes:
    return token_blob(ids(*tokens))


def stream_requests(
    items: Sequence[Sequence[int]],
) -> AsyncGenerator[inference_pb2.ScoreRequest, None]:
    async def requests() -> AsyncGenerator[inference_pb2.ScoreRequest, None]:
        for index, item in enumerate(items):
            packed = inference_pb2.PackedTokens(tokens=blob(*item), offsets=[0, len(item)])
            yield inference_pb2.ScoreRequest(
                request_id=str(index), item_tokens=packed, log_likelihood=LIKELIHOOD
            )

    return requests()


async def test_a_stream_answers_each_call_or_says_what_was_wrong_with_it() -> None:
    async with serving(BigramEngine()) as served:
        answers = dict[str, Scores | ClientError]()
        async for name, result in served.client.score_stream(
            stream_requests([(0, 1), (0, 3), (1, 2)])
        ):
            answers[name] = result
        first, second, third = answers["0"], answers["1"], answers["2"]
        assert isinstance(first, Scores) and isinstance(third, Scores)
        assert first.scores == pytest.approx([math.log(0.2)])
        assert third.scores == pytest.approx([math.log(0.3)])
        assert isinstance(second, ClientError)
        assert second.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(second.violations) == ["item_tokens.tokens"]


async def test_a_stream_runs_at_most_its_limit_of_calls_at_once() -> None:
    async with serving(BigramEngine(), limits=Limits(max_stream_calls=3)) as served:
        served.engine.hold.clear()
        answers = served.client.score_stream(stream_requests([(0, 1)] * 10))
        first = asyncio.create_task(anext(answers))
        await until(lambda: served.engine.running == 3)
        await asyncio.sleep(0.05)
        assert served.engine.running == 3
        served.engine.hold.set()
        await first
        assert sum([1 async for _ in answers]) == 9


async def test_leaving_a_stream_cancels_its_calls() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.hold.clear()
        answers = served.client.score_stream(stream_requests([(0, 1)] * 3))
        first = asyncio.create_task(anext(answers))
        await until(lambda: served.engine.running == 3)
        first.cancel()
        await until(lambda: served.engine.running == 0)
