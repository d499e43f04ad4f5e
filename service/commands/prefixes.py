"""The commands that name prefixes which many requests share."""

import time
from collections.abc import Awaitable, Sequence
from typing import Annotated

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from stemserve.proto.v1 import prefixes_pb2, prefixes_pb2_grpc
from stemserve.service.client.answers import pages_of
from stemserve.service.client.routing import route
from stemserve.service.commands.call import (
    SERVER,
    TIMEOUT_S,
    AsJson,
    Channel,
    Server,
    Timeout,
    call,
)
from stemserve.service.commands.options import read_text
from stemserve.service.commands.plain_json import print_json

PAGE = 1000

app = typer.Typer(
    help="Register, look up, renew and release prefixes that many requests share.",
    no_args_is_help=True,
)

PrefixId = Annotated[str, typer.Argument(help="As Register answered it, or as you chose it.")]
Ttl = Annotated[float, typer.Option(metavar="SECONDS", help="Lifetime without use; 0: as it was.")]


@app.command()
def register(
    text: Annotated[str, typer.Option(metavar="TEXT", help="The prefix's text.")] = "",
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of the text; - reads standard input.")
    ] = None,
    parent_prefix_id: Annotated[
        str, typer.Option(metavar="ID", help="Prefix that this one continues.")
    ] = "",
    prefix_id: Annotated[
        str, typer.Option(metavar="ID", help="Id to give it; else the server makes one.")
    ] = "",
    ttl_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Lifetime without use; 0: the server's.")
    ] = 0.0,
    warm: Annotated[bool, typer.Option("--warm", help="Compute its KV before answering.")] = False,
    pin: Annotated[
        bool, typer.Option("--pin", help="Warm it, and keep it in the KV cache until released.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Let the tenants of the sharing group use it too.")
    ] = False,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Give a text an id. Requests then name it with --prefix-id.

    \b
    Example:
      stemserve prefixes register --file article.txt --prefix-id article --warm
    """
    if bool(text) == (file is not None):
        raise typer.BadParameter("give one of --text and --file")
    request = prefixes_pb2.RegisterRequest(
        text=text if file is None else read_text("--file", file),
        parent_prefix_id=parent_prefix_id,
        prefix_id=prefix_id,
        ttl_seconds=ttl_seconds,
        warm=warm,
        pin=pin,
        shared=shared,
    )

    async def run(channel: Channel) -> prefixes_pb2.RegisterResponse:
        return await prefixes_pb2_grpc.PrefixesStub(channel).Register(
            request, timeout=timeout, metadata=route(request)
        )

    response = call(server, run)
    _print(response, [response.prefix], as_json)


@app.command()
def get(
    prefix_id: PrefixId,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show one prefix: its tokens, how many are in the KV cache now, and until when it lives."""
    request = prefixes_pb2.GetRequest(prefix_id=prefix_id)

    async def run(channel: Channel) -> prefixes_pb2.GetResponse:
        return await prefixes_pb2_grpc.PrefixesStub(channel).Get(
            request, timeout=timeout, metadata=route(request)
        )

    response = call(server, run)
    _print(response, [response.prefix], as_json)


@app.command(name="list")
def list_all(
    server: Server = SERVER, timeout: Timeout = TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show all prefixes."""

    async def run(channel: Channel) -> prefixes_pb2.ListResponse:
        stub = prefixes_pb2_grpc.PrefixesStub(channel)

        def read(token: str) -> Awaitable[prefixes_pb2.ListResponse]:
            request = prefixes_pb2.ListRequest(page_size=PAGE, page_token=token)
            return stub.List(request, timeout=timeout)

        return prefixes_pb2.ListResponse(
            prefixes=[one async for page in pages_of(read) for one in page.prefixes]
        )

    response = call(server, run)
    _print(response, response.prefixes, as_json)


@app.command()
def renew(
    prefix_id: PrefixId,
    ttl_seconds: Ttl = 0.0,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Let a prefix live on; each use of it does so too."""
    request = prefixes_pb2.RenewRequest(prefix_id=prefix_id, ttl_seconds=ttl_seconds)

    async def run(channel: Channel) -> prefixes_pb2.RenewResponse:
        return await prefixes_pb2_grpc.PrefixesStub(channel).Renew(
            request, timeout=timeout, metadata=route(request)
        )

    response = call(server, run)
    _print(response, [response.prefix], as_json)


@app.command()
def release(
    prefix_id: PrefixId,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Give a prefix up; once for each time that it was registered."""
    request = prefixes_pb2.ReleaseRequest(prefix_id=prefix_id)

    async def run(channel: Channel) -> prefixes_pb2.ReleaseResponse:
        return await prefixes_pb2_grpc.PrefixesStub(channel).Release(
            request, timeout=timeout, metadata=route(request)
        )

    response = call(server, run)
    if as_json:
        _print(response, [], as_json)
    else:
        print(f"released {prefix_id}")


def _print(response: Message, prefixes: Sequence[prefixes_pb2.Prefix], json_wanted: bool) -> None:
    if json_wanted:
        print_json(response)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("prefix id", overflow="fold")
    table.add_column("parent", overflow="fold")
    for name in ("tokens", "in the cache", "expires in"):
        table.add_column(name, justify="right")
    table.add_column("pinned")
    for prefix in prefixes:
        left_s = prefix.expires_unix_seconds - time.time()
        table.add_row(
            prefix.prefix_id,
            prefix.parent_prefix_id,
            str(prefix.token_count),
            str(prefix.resident_tokens),
            f"{left_s:.0f} s" if prefix.expires_unix_seconds else "never",
            "yes" if prefix.pinned else "no",
        )
    Console().print(table)
