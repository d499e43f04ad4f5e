"""ScoreStream through a real socket."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import ClientError, Scores, token_blob
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


async def test_a_call_that_its_client_cancels_ends_alone() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.hold.clear()
        more: asyncio.Queue[inference_pb2.ScoreStreamRequest | None] = asyncio.Queue()
        answers = served.client.score_stream(queued(more))
        for name in ("stays", "goes", "goes"):
            more.put_nowait(message_of(name))
        more.put_nowait(inference_pb2.ScoreStreamRequest(cancel_request_id="unknown"))
        first = asyncio.create_task(anext(answers))
        await until(lambda: served.engine.running == 3)
        more.put_nowait(inference_pb2.ScoreStreamRequest(cancel_request_id="goes"))
        for name, error in [await first, await anext(answers)]:
            assert name == "goes" and isinstance(error, ClientError)
            assert error.code is grpc.StatusCode.CANCELLED
        assert served.engine.running == 1
        more.put_nowait(None)
        served.engine.hold.set()
        ((name, scores),) = [answer async for answer in answers]
        assert name == "stays" and isinstance(scores, Scores)
        assert (
            served.metric("requests_total", method="score", code="CANCELLED", tenant="other") == 2
        )


async def test_a_cancel_is_heard_behind_calls_that_wait_and_ends_them_too() -> None:
    async with serving(BigramEngine(), limits=Limits(max_stream_calls=2)) as served:
        served.engine.hold.clear()
        more: asyncio.Queue[inference_pb2.ScoreStreamRequest | None] = asyncio.Queue()
        for name in ("runs", "waits", "waits", "last"):
            more.put_nowait(message_of(name))
        more.put_nowait(inference_pb2.ScoreStreamRequest(cancel_request_id="waits"))
        answers = served.client.score_stream(queued(more))
        names = {(await anext(answers))[0], (await anext(answers))[0]}
        assert names == {"waits"}
        await until(lambda: served.engine.running == 2)
        more.put_nowait(None)
        served.engine.hold.set()
        assert sorted([name async for name, _ in answers]) == ["last", "runs"]


async def test_a_client_that_does_not_read_holds_up_its_own_stream_only() -> None:
    request = inference_pb2.ScoreRequest(query="Q", items=["x"] * 2_000, request_id="r")
    request.label_probabilities.label_token_ids.extend(range(BYTE_VOCABULARY))
    engine = BigramEngine(random_bigrams(BYTE_VOCABULARY))
    async with serving(engine) as served:
        served.engine.part_units = 100
        call = served.channel.stream_stream(
            "/stemserve.v1.Inference/ScoreStream",
            request_serializer=inference_pb2.ScoreStreamRequest.SerializeToString,
            response_deserializer=inference_pb2.ScoreStreamResponse.FromString,
        )()
        for _ in range(4):
            await call.write(inference_pb2.ScoreStreamRequest(request=request, stream_items=50))
        await until(lambda: served.engine.running == 4)
        await asyncio.sleep(0.2)
        assert served.engine.running == 4
        scores = await served.client.score(["a"], LIKELIHOOD, query="Q")
        assert np.isfinite(scores.scores).all()
        call.cancel()
        await until(lambda: served.engine.running == 0)


def message_of(name: str) -> inference_pb2.ScoreStreamRequest:
    packed = inference_pb2.PackedTokens(tokens=blob(0, 1), offsets=[0, 2])
    request = inference_pb2.ScoreRequest(
        request_id=name, item_tokens=packed, log_likelihood=LIKELIHOOD
    )
    return inference_pb2.ScoreStreamRequest(request=request)


async def queued(
    messages: asyncio.Queue[inference_pb2.ScoreStreamRequest | None],
) -> AsyncGenerator[inference_pb2.ScoreStreamRequest, None]:
    while (message := await messages.get()) is not None:
        yield message
