"""Ask every call for its credentials before anything else reads it."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from stemserve.service.caller import Caller, salt_of, set_caller
from stemserve.service.config.access import AuthConfig, TenantConfig
from stemserve.service.errors import Unauthenticated
from stemserve.service.metadata_keys import STATUS_DETAILS_KEY
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving.credentials import Identify, identification
from stemserve.service.serving.handler_memo import HandlerMemo
from stemserve.service.serving.health import SERVICE_NAME as HEALTH_SERVICE
from stemserve.service.serving.status import status_code, status_message

OPEN_METHODS = frozenset(f"/{HEALTH_SERVICE}/{method}" for method in ("Check", "Watch"))

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # a grpc.RpcMethodHandler, which cannot be subscripted at run time


@dataclass(frozen=True, slots=True)
class _Presented:
    context: Context

    @property
    def metadata(self) -> Mapping[str, str]:
        pairs: Any = self.context.invocation_metadata() or ()
        return {key: value for key, value in pairs if isinstance(value, str)}

    @property
    def certificate(self) -> Mapping[str, Iterable[bytes]]:
        return self.context.auth_context()


class Authentication(grpc.aio.ServerInterceptor):
    """Covers every method that the server has; only health is open."""

    def __init__(self, identify: Identify, callers: Mapping[str, Caller], metrics: Metrics) -> None:
        self._identify = identify
        self._callers = callers
        self._metrics = metrics
        self._handlers = HandlerMemo(lambda _, handler: self._guarded(handler))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler_call_details.method in OPEN_METHODS:
            return handler
        if handler is None:
            return None
        return self._handlers.wrapped(handler_call_details.method, handler)

    def _guarded(self, handler: Handler) -> Handler:
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            stream: Any = handler.stream_stream or handler.unary_stream

            async def iterate(request: Any, context: Context) -> AsyncGenerator[Any]:
                await self._admit(context)
                async with aclosing(stream(request, context)) as answers:
                    async for answer in answers:
                        yield answer

            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(iterate, *codec)
            return grpc.unary_stream_rpc_method_handler(iterate, *codec)
        unary: Any = handler.stream_unary or handler.unary_unary

        async def call(request: Any, context: Context) -> Any:
            await self._admit(context)
            return await unary(request, context)

        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(call, *codec)
        return grpc.unary_unary_rpc_method_handler(call, *codec)

    async def _admit(self, context: Context) -> None:
        try:
            set_caller(self._callers[self._identify(_Presented(context))])
        except Unauthenticated as error:
            self._metrics.unauthenticated(error.reason)
            details = status_message(error).SerializeToString()
            await context.abort(status_code(error), str(error), ((STATUS_DETAILS_KEY, details),))


def authentication(
    auth: AuthConfig, tenants: Mapping[str, TenantConfig], metrics: Metrics
) -> list[Authentication]:
    """The interceptor, or none where callers are not told apart.

    The key of the salts is new with every process: nothing that is cached outlives it.
    """
    identify = identification(auth, tenants)
    if identify is None:
        return []
    server_key = secrets.token_bytes(32)
    callers = {
        name: Caller(
            tenant=name,
            salt=salt_of(server_key, f"tenant:{name}"),
            group=tenant.group,
            group_salt=salt_of(server_key, f"group:{tenant.group}") if tenant.group else b"",
            max_prefix_bytes=tenant.max_prefix_bytes,
            max_trie_bytes=tenant.max_trie_bytes,
            max_priority=tenant.max_priority,
        )
        for name, tenant in tenants.items()
    }
    return [Authentication(identify, callers, metrics)]
