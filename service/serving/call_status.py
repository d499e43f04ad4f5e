"""Answer every call with a proper status, count it, and close what it opened."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from stemserve.service.errors import DeadlinePassed, InvalidRequest, RequestError
from stemserve.service.metrics import Metrics
from stemserve.service.serving.status import DETAILS_KEY, status_code, status_message, unexpected

OUR_SERVICES = "/stemserve."
METHOD_LABELS = {
    "Score": "score",
    "ScoreStream": "score_stream",
    "Generate": "generate",
    "Register": "register",
    "Get": "get",
    "List": "list",
    "Renew": "renew",
    "Release": "release",
    "GetModel": "get_model",
    "GetLimits": "get_limits",
    "GetLoad": "get_load",
    "Explain": "explain",
}

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # a grpc.RpcMethodHandler, which cannot be subscripted at run time
Call = Callable[[Any, Context], Awaitable[Any]]
Parse = Callable[[bytes], Any]

logger = logging.getLogger(__name__)


class CallStatus(grpc.aio.ServerInterceptor):
    """Goes before all other interceptors: it writes the messages of a stream itself, so that the
    handler is closed at once when the client leaves, and parses requests itself, so that bytes that
    are not one are the client's fault."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        ours = method.startswith(OUR_SERVICES)
        label = METHOD_LABELS.get(method.rpartition("/")[2]) if ours else None
        return self._answering(handler, label)

    def _answering(self, handler: Handler, label: str | None) -> Handler:
        """Without a label the calls are not counted: health and reflection."""
        # The stubs describe synchronous handlers only; ours are all asynchronous.
        unary: Any = handler.unary_unary
        stream: Any = handler.unary_stream
        both: Any = handler.stream_stream
        parse = _parser(handler.request_deserializer)

        async def answer(blob: bytes, context: Context) -> Any:
            return await self._counted(label, context, _answer(unary, parse, blob, context))

        async def write(blobs: Any, context: Context) -> None:
            def answers() -> Any:
                if stream is None:
                    return both(_parse_each(parse, blobs), context)
                return stream(parse(blobs), context)

            await self._counted(label, context, _write_all(answers, context))

        codec: Any = (None, handler.response_serializer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_as_handler(write), *codec)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_as_handler(write), *codec)
        return grpc.unary_unary_rpc_method_handler(_as_handler(answer), *codec)

    async def _counted(self, label: str | None, context: Context, call: Awaitable[Any]) -> Any:
        started = time.monotonic()
        code = "OK"
        try:
            return await call
        except RequestError as error:
            code = status_code(error).name
            self._metrics.rejected(error)
            await _abort(context, error)
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if deadline_passed(context) else "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = context.code().name
            raise
        except Exception as error:
            logger.exception("%s failed", label or "a call")
            fault = unexpected(error)
            code = status_code(fault).name
            await _abort(context, fault)
        finally:
            if label is not None:
                self._metrics.finished(label, code, time.monotonic() - started)


def remaining_deadline(context: Context) -> float | None:
    """On the monotonic clock."""
    remaining = _time_remaining(context)
    if remaining is None:
        return None
    if remaining <= 0:
        raise DeadlinePassed("the deadline passed before the call was read")
    return time.monotonic() + remaining


def deadline_passed(context: Context) -> bool:
    remaining = _time_remaining(context)
    return remaining is not None and remaining <= 0


def _time_remaining(context: Context) -> float | None:
    remaining: Any = context.time_remaining()  # the stubs leave None out
    return None if remaining is None else float(remaining)


def _as_handler(function: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    return function


def _parser(deserialize: Parse | None) -> Parse:
    def parse(blob: bytes) -> Any:
        if deserialize is None:
            return blob
        try:
            return deserialize(blob)
        except DecodeError as error:
            raise InvalidRequest("request", f"is not a message of its type: {error}") from error

    return parse


async def _answer(call: Call, parse: Parse, blob: bytes, context: Context) -> Any:
    return await call(parse(blob), context)


async def _parse_each(parse: Parse, blobs: AsyncIterator[bytes]) -> AsyncGenerator[Any]:
    async for blob in blobs:
        yield parse(blob)


async def _write_all(answers: Callable[[], Any], context: Context) -> None:
    async with aclosing(answers()) as messages:
        async for message in messages:
            await context.write(message)


async def _abort(context: Context, error: RequestError) -> None:
    status = status_message(error)
    await context.abort(
        status_code(error), str(error), ((DETAILS_KEY, status.SerializeToString()),)
    )
