"""Answer the Score calls of one stream as they are done, a bounded number at once."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing

import grpc
from google.rpc import status_pb2

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import RequestError
from stemserve.service.serving.status import status_message, unexpected

Score = Callable[
    [inference_pb2.ScoreStreamRequest], AsyncGenerator[inference_pb2.ScoreResponse, None]
]
Requests = AsyncIterator[inference_pb2.ScoreStreamRequest]
Answer = inference_pb2.ScoreStreamResponse

CANCELLED = status_pb2.Status(
    code=grpc.StatusCode.CANCELLED.value[0], message="the client cancelled this call of its stream"
)

logger = logging.getLogger(__name__)


class _Call:
    """One request of the stream."""

    def __init__(self, request: inference_pb2.ScoreStreamRequest) -> None:
        self.request = request
        self.request_id = request.request.request_id
        self.taken = asyncio.Event()  # no message of it waits
        self.taken.set()
        self.is_cancelled = False
        self.scope: asyncio.Timeout | None = None  # of what a cancel ends; None: not begun

    def cancel(self) -> None:
        if self.scope is not None and not self.is_cancelled:
            self.scope.reschedule(0.0)
        self.is_cancelled = True


class ScoreStreamCalls:
    """`score` gives the answers of one request, as many as it has parts; the last has usage.

    A call goes on when its newest message was taken, so that a client that does not read holds up
    nothing but its own stream, and no more than a message a call waits for it.
    """

    def __init__(self, score: Score, *, max_calls: int) -> None:
        self._score = score
        # An answer that the client has not taken counts as running. As many requests more are read,
        # so that what cancels a running call is not stuck behind them.
        self._free = asyncio.Semaphore(max_calls)
        self._room = asyncio.Semaphore(2 * max_calls)
        self._calls: dict[str, set[_Call]] = {}  # that can be cancelled, by request id
        self._answers: asyncio.Queue[tuple[_Call, Answer] | None] = asyncio.Queue()

    async def answers(self, requests: Requests) -> AsyncGenerator[Answer, None]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (news := await self._answers.get()) is not None:
                call, answer = news
                yield answer
                call.taken.set()
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Requests) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for message in requests:
                    if message.WhichOneof("action") == "cancel_request_id":
                        for call in self._calls.get(message.cancel_request_id, ()):
                            call.cancel()
                        continue
                    await self._room.acquire()
                    call = _Call(message)
                    self._calls.setdefault(call.request_id, set()).add(call)
                    tasks.create_task(self._run(call))
        except ExceptionGroup as group:  # of one: no call raises
            raise group.exceptions[0] from None
        finally:
            self._answers.put_nowait(None)

    async def _run(self, call: _Call) -> None:
        async with AsyncExitStack() as held:
            held.callback(self._room.release)
            try:
                async with asyncio.timeout(None) as call.scope:
                    if call.is_cancelled:
                        raise TimeoutError
                    await held.enter_async_context(self._free)
                    await self._answer(call)
            except TimeoutError:
                await self._tell(call, Answer(error=CANCELLED))
            finally:
                self._forget(call)
            await call.taken.wait()

    async def _answer(self, call: _Call) -> None:
        try:
            async with aclosing(self._score(call.request)) as responses:
                async for response in responses:
                    more = not response.HasField("usage")
                    await self._tell(call, Answer(response=response, more=more))
        except RequestError as error:
            await self._tell(call, Answer(error=status_message(error)))
        except Exception as error:
            logger.exception("a call of a stream failed")
            await self._tell(call, Answer(error=status_message(unexpected(error))))

    async def _tell(self, call: _Call, answer: Answer) -> None:
        await call.taken.wait()
        call.taken.clear()
        answer.request_id = call.request_id
        self._answers.put_nowait((call, answer))

    def _forget(self, call: _Call) -> None:
        same = self._calls[call.request_id]
        same.discard(call)
        if not same:
            del self._calls[call.request_id]
