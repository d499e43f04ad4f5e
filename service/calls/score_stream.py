"""Answer the Score calls of one stream as they are done, a bounded number at once."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from google.rpc import status_pb2

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import RequestError
from stemserve.service.serving.status import status_message, unexpected

Score = Callable[[inference_pb2.ScoreRequest], Awaitable[inference_pb2.ScoreResponse]]
Requests = AsyncIterator[inference_pb2.ScoreStreamRequest]
Answer = inference_pb2.ScoreStreamResponse

logger = logging.getLogger(__name__)


class ScoreStreamCalls:
    def __init__(self, score: Score, *, max_calls: int) -> None:
        self._score = score
        # An answer that the client has not taken counts as running.
        self._free = asyncio.Semaphore(max_calls)
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()

    async def answers(self, requests: Requests) -> AsyncGenerator[Answer, None]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
                self._free.release()
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Requests) -> None:
        try:
            async with asyncio.TaskGroup() as calls:
                async for message in requests:
                    await self._free.acquire()
                    calls.create_task(self._answer(message.request))
        except ExceptionGroup as group:  # of one: no call raises
            raise group.exceptions[0] from None
        finally:
            self._answers.put_nowait(None)

    async def _answer(self, request: inference_pb2.ScoreRequest) -> None:
        answer = Answer(request_id=request.request_id)
        try:
            answer.response.CopyFrom(await self._score(request))
        except RequestError as error:
            answer.error.CopyFrom(status_message(error))
        except Exception as error:
            logger.exception("a call of a stream failed")
            answer.error.CopyFrom(_unexpected_status(error))
        self._answers.put_nowait(answer)


def _unexpected_status(error: Exception) -> status_pb2.Status:
    return status_message(unexpected(error))
