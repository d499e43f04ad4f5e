"""Answer every call with a proper status, count it, and close what it opened."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from stemserve.service.errors import DeadlinePassed, InvalidRequest, RequestError
from stemserve.service.metadata_keys import STATUS_DETAILS_KEY
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.serving.handler_memo import HandlerMemo
from stemserve.service.serving.status import status_code, status_message, unexpected

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
    "UploadTrie": "upload_trie",
    "GetTrie": "get_trie",
    "ListTries": "list_tries",
    "DeleteTrie": "delete_trie",
    "GetModel": "get_model",
    "GetLimits": "get_limits",
    "GetLoad": "get_load",
    "Explain": "explain",
}

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # a grpc.RpcMethodHandler, which cannot be subscripted at run time
Call = Callable[[Any, Context], Awaitable[Any]]
Parse = Callable[[bytes], Any]

STATUS_S = 10.0  # that a call waits for its client to take its status

# Of calls without a deadline, set for the task of such a call.
_default_deadline_s: ContextVar[float | None] = ContextVar("default_deadline_s", default=None)

logger = logging.getLogger(__name__)


class _Method(NamedTuple):
    name: str  # full, with the first slash
    label: str | None  # of the metrics; None: its calls are not counted (health and reflection)


class CallStatus(grpc.aio.ServerInterceptor):
    """Goes before all other interceptors: it writes the messages of a stream itself, so that the
    handler is closed at once when the client leaves, and parses requests itself, so that bytes that
    are not one are the client's fault."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        default_deadline_s: float = 0.0,
        watch: CallWatch | None = None,
    ) -> None:
        """`default_deadline_s` is for calls without a deadline; 0: they have none."""
        self._metrics = metrics
        self._watch = watch or CallWatch()
        self._default_deadline_s = default_deadline_s
        self._handlers = HandlerMemo(self._answering)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._handlers.wrapped(handler_call_details.method, handler)

    def _answering(self, method: str, handler: Handler) -> Handler:
        ours = method.startswith(OUR_SERVICES)
        label = METHOD_LABELS.get(method.rpartition("/")[2]) if ours else None
        called = _Method(method, label)
        # The stubs describe synchronous handlers only; ours are all asynchronous.
        unary: Any = handler.unary_unary
        stream: Any = handler.unary_stream
        upload: Any = handler.stream_unary
        both: Any = handler.stream_stream
        parse = _parser(handler.request_deserializer)

        async def answer(blob: bytes, context: Context) -> Any:
            return await self._counted(called, context, _answer(unary, parse, blob, context))

        async def take(blobs: Any, context: Context) -> Any:
            call = upload(_parse_each(parse, blobs), context)
            return await self._counted(called, context, call)

        async def write(blobs: Any, context: Context) -> None:
            def answers() -> Any:
                if stream is None:
                    return both(_parse_each(parse, blobs), context)
                return stream(parse(blobs), context)

            call = _write_all(answers, context)
            await self._counted(called, context, call, is_session=stream is None)

        codec: Any = (None, handler.response_serializer)
        if upload is not None:
            return grpc.stream_unary_rpc_method_handler(_as_handler(take), *codec)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_as_handler(write), *codec)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_as_handler(write), *codec)
        return grpc.unary_unary_rpc_method_handler(_as_handler(answer), *codec)

    async def _counted(
        self, method: "_Method", context: Context, call: Awaitable[Any], *, is_session: bool = False
    ) -> Any:
        """A session is a stream of many calls, each with a default deadline of its own."""
        started = time.monotonic()
        code = "OK"
        fault: Exception | None = None
        if method.label is not None:
            self._watch.begin(method.name, context)
        try:
            if method.label is None or not self._default_deadline_s or _has_deadline(context):
                return await call
            _default_deadline_s.set(self._default_deadline_s)
            return await (call if is_session else _within(self._default_deadline_s, call))
        except (RequestError, asyncio.CancelledError) as raised:
            error = _refusal(raised)
            if error is None:
                code = "DEADLINE_EXCEEDED" if deadline_passed(context) else "CANCELLED"
                raise
            code, fault = status_code(error).name, error
            self._metrics.rejected(error)
            await _abort(context, error)
        except grpc.aio.AbortError:
            code = context.code().name
            raise
        except Exception as error:
            logger.exception("%s failed", method.label or "a call")
            code, fault = "INTERNAL", error
            await _abort(context, unexpected(error))
        finally:
            if method.label is not None:
                self._end(method.label, code, time.monotonic() - started, fault)

    def _end(self, label: str, code: str, seconds: float, fault: Exception | None) -> None:
        def note() -> None:
            self._metrics.finished(label, code, seconds)
            self._watch.end(code, seconds, fault)

        if code == "OK":
            asyncio.get_running_loop().call_soon(note)  # the answer goes out first
        else:
            note()  # the status has gone


def remaining_deadline(context: Context) -> float | None:
    """On the monotonic clock. The caller's, or else the server's default from now on."""
    remaining = _time_remaining(context)
    if remaining is None:
        remaining = _default_deadline_s.get()
    if remaining is None:
        return None
    if remaining <= 0:
        raise DeadlinePassed("the deadline passed before the call was read")
    return time.monotonic() + remaining


async def _within(seconds: float, call: Awaitable[Any]) -> Any:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await call
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlinePassed(
            f"the call took longer than {seconds:g} s, the default here; send a deadline with it"
        ) from None


def deadline_passed(context: Context) -> bool:
    remaining = _time_remaining(context)
    return remaining is not None and remaining <= 0


def _has_deadline(context: Context) -> bool:
    return _time_remaining(context) is not None


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


def _refusal(raised: RequestError | asyncio.CancelledError) -> RequestError | None:
    """None where the client has left. A call that is cut by others, wherever it waits, is cancelled
    with the reason as the argument."""
    if isinstance(raised, RequestError):
        return raised
    return next((reason for reason in raised.args if isinstance(reason, RequestError)), None)


async def _abort(context: Context, error: RequestError) -> None:
    """A status waits behind what the client has not read. Where it never reads, gRPC keeps both
    until the connection ends; the call itself ends here."""
    details = status_message(error).SerializeToString()
    try:
        async with asyncio.timeout(STATUS_S):
            await context.abort(status_code(error), str(error), ((STATUS_DETAILS_KEY, details),))
    except TimeoutError:
        raise asyncio.CancelledError from error
