"""Make the client library's calls; tell a server the prefixes that it lacks."""

from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from stemserve.proto.v1 import prefixes_pb2
from stemserve.service.client_errors import ClientError, client_error
from stemserve.service.client_prefixes import KnownPrefixes
from stemserve.service.client_routing import prefix_ids, route

Metadata = tuple[tuple[str, str], ...]
Answer = TypeVar("Answer")

NOT_KNOWN = "PREFIX_NOT_FOUND"  # the reason in a server's error


class Calls:
    """With `known` a call that names a prefix which its server lacks is made twice."""

    def __init__(
        self, prefixes: Any, *, known: KnownPrefixes | None, timeout_s: float | None
    ) -> None:
        self._prefixes = prefixes
        self._known = known
        self._timeout_s = timeout_s

    async def answer(self, method: Any, request: Message) -> Any:
        metadata = route(request)
        try:
            return await answer_of(method(request, timeout=self._timeout_s, metadata=metadata))
        except ClientError as error:
            if not await self.registered_again(error, request):
                raise
        return await answer_of(method(request, timeout=self._timeout_s, metadata=metadata))

    async def registered_again(self, error: ClientError, request: Message) -> bool:
        """Whether the server to which `request` goes has prefixes now that it lacked."""
        if self._known is None or error.reason != NOT_KNOWN:
            return False
        told = False
        for prefix in self._known.with_parents(prefix_ids(request)):
            if not await self._has(prefix.prefix_id, route(request)):
                register = self._prefixes.Register
                metadata = route(request)  # the call's server, whatever the prefix's own
                await answer_of(register(prefix, timeout=self._timeout_s, metadata=metadata))
                told = True
        return told

    async def _has(self, prefix_id: str, metadata: Metadata) -> bool:
        """Registering what is there would add an owner to it."""
        get = prefixes_pb2.GetRequest(prefix_id=prefix_id)
        try:
            await answer_of(self._prefixes.Get(get, timeout=self._timeout_s, metadata=metadata))
        except ClientError as error:
            if error.reason != NOT_KNOWN:
                raise
            return False
        return True


async def answer_of(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise client_error(error) from error


async def answers_of(call: Any, kind: type[Answer]) -> AsyncGenerator[Answer, None]:
    try:
        async for answer in call:
            yield answer
    except grpc.aio.AioRpcError as error:
        raise client_error(error) from error
    finally:
        call.cancel()
