"""Make the calls of one command."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import grpc
import typer

from stemserve.service.client import OPTIONS
from stemserve.service.client_errors import client_error
from stemserve.service.commands.failure import fail_call

T = TypeVar("T")
Channel = grpc.aio.Channel

Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The server to call.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long a call may take.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with the proto's field names.")
]
SERVER = "127.0.0.1:50051"
TIMEOUT_S = 300.0


def call(server: str, work: Callable[[Channel], Awaitable[T]]) -> T:
    """The result of `work` on a channel to the server; a failed call ends the command."""
    if ":" not in server:
        raise typer.BadParameter(f"--server {server!r} has no port; give HOST:PORT, as {SERVER}")
    try:
        return asyncio.run(_with_channel(server, work))
    except grpc.aio.AioRpcError as error:
        fail_call(client_error(error), server)


async def _with_channel(server: str, work: Callable[[Channel], Awaitable[T]]) -> T:
    async with grpc.aio.insecure_channel(server, options=OPTIONS) as channel:
        return await work(channel)
