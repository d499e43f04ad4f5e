"""Wait for a server's answers, also page by page; turn its errors into the client library's."""

from collections.abc import AsyncGenerator, Awaitable, Callable
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


async def pages_of(read: Callable[[str], Awaitable[Any]]) -> AsyncGenerator[Any, None]:
    """The pages of a list; `read` takes the token of a page, an empty one for the first."""
    token = ""
    while True:
        page = await read(token)
        yield page
        token = page.next_page_token
        if not token:
            return
