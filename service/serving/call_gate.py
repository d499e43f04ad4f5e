"""Refuse calls before the server is ready, while the last ones finish, and above a number."""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import aclosing
from typing import Any, cast

import grpc

from stemserve.service.caller import current_caller
from stemserve.service.errors import NotReady, QueueFull
from stemserve.service.serving.handler_memo import HandlerMemo
from stemserve.service.tenant_shares import TenantShares

OUR_SERVICES = "/stemserve."
LOADING = "the model is loading; retry in a moment"
DRAINING = "the server is shutting down; retry on another one"
RETRY_AFTER_S = 1.0

Handler = Any  # a grpc.RpcMethodHandler, which cannot be subscripted at run time
Context = grpc.aio.ServicerContext[Any, Any]
_Place = tuple[str, asyncio.Task[Any]]  # a tenant's, of a call


class CallGate(grpc.aio.ServerInterceptor):
    """Closed at first. Counts the calls of our services; health and reflection always pass, which
    is why gRPC's own limit of concurrent calls is not used.

    Goes behind CallStatus, which turns the refusal into a status, and behind Authentication: who
    may not call takes no place.

    A stream of many calls (ScoreStream) may stay open for days: a new one is refused by a drain,
    but an open one is not waited for.

    What a drain does not wait for is cut: left to the end of its connection, a call might reach its
    client as CANCELLED, which nobody retries.
    """

    def __init__(self, *, max_calls: int, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of the tenants."""
        self._refusing: Handler | None = _refusing(LOADING)
        self._max_calls = max_calls
        self._shares = TenantShares(max_calls, weights or {})
        self._open: Counter[str] = Counter()  # by tenant
        self._tasks = set[asyncio.Task[Any]]()  # of open calls
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._handlers = HandlerMemo(lambda _, handler: self._counted(handler))

    @property
    def running_calls(self) -> int:
        return self._running

    def open(self) -> None:
        self._refusing = None

    def drain(self) -> None:
        """New calls fail with UNAVAILABLE from now on."""
        self._refusing = _refusing(DRAINING)

    def cut(self) -> None:
        """Calls that are open end with UNAVAILABLE."""
        for task in self._tasks:
            task.cancel(NotReady(DRAINING))

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if not handler_call_details.method.startswith(OUR_SERVICES):
            return await continuation(handler_call_details)
        if self._refusing is not None:
            return self._refusing
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._handlers.wrapped(handler_call_details.method, handler)

    def _counted(self, handler: Handler) -> Handler:
        # The stubs describe synchronous handlers only; ours are all asynchronous.
        unary: Any = handler.unary_unary or handler.stream_unary
        stream: Any = handler.unary_stream
        both: Any = handler.stream_stream

        async def call(request: Any, context: Context) -> Any:
            place = self._enter()
            self._begin()
            try:
                return await unary(request, context)
            finally:
                self._leave(place)
                self._end()

        async def iterate(request: Any, context: Context) -> AsyncGenerator[Any]:
            place = self._enter()
            self._begin()
            try:
                async with aclosing(stream(request, context)) as answers:
                    async for answer in answers:
                        yield answer
            finally:
                self._leave(place)
                self._end()

        async def converse(requests: Any, context: Context) -> AsyncGenerator[Any]:
            place = self._enter()
            try:
                async with aclosing(both(requests, context)) as answers:
                    async for answer in answers:
                        yield answer
            finally:
                self._leave(place)

        return _of_kind(handler, call, iterate, converse)

    def _enter(self) -> _Place:
        """Of the caller's tenant; `_leave` gives it back. Raises QueueFull."""
        tenant = current_caller().tenant
        if not self._shares.fits(self._open, tenant, 1):
            raise QueueFull(
                f"{self._open.total()} calls are open, and max_concurrent_calls is "
                f"{self._max_calls}",
                retry_after_s=RETRY_AFTER_S,
            )
        task = asyncio.current_task()
        assert task is not None
        self._open[tenant] += 1
        self._tasks.add(task)
        return tenant, task

    def _leave(self, place: _Place) -> None:
        tenant, task = place
        self._open[tenant] -= 1
        self._tasks.discard(task)

    def _begin(self) -> None:
        self._running += 1
        self._idle.clear()

    def _end(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._idle.set()


def _refusing(reason: str) -> Handler:
    async def refuse(requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any]:
        raise NotReady(reason)
        yield  # makes the function a stream

    return cast(Any, grpc.stream_stream_rpc_method_handler(refuse))


def _of_kind(handler: Handler, call: Any, iterate: Any, converse: Any) -> Handler:
    """One of the three as a handler of the same kind: what it reads and what it answers."""
    codec = (handler.request_deserializer, handler.response_serializer)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(call, *codec)
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(call, *codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(iterate, *codec)
    return grpc.stream_stream_rpc_method_handler(converse, *codec)
