"""Wait for a server's answers; turn its errors into the client library's."""

from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import grpc

from stemserve.service.client.errors import client_error

Metadata = tuple[tuple[str, str], ...]
Answer = TypeVar("Answer")


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
