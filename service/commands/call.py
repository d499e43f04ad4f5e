"""Make the calls of one command."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import typer

import stemserve
from stemserve.service.client.channel import OPTIONS, PLAINTEXT, Access, open_channel
from stemserve.service.client.errors import client_error
from stemserve.service.commands.failure import fail, fail_call
from stemserve.service.target import check_target
from stemserve.service.tracing.trace_context import PARENT_KEY, remote_parent

T = TypeVar("T")
Channel = grpc.aio.Channel

Server = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="The server to call. --tls, --ca, --api-key and the like stand before the command.",
    ),
]
LONGEST_S = 1_000_000.0  # gRPC counts milliseconds in 32 bits


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number of seconds") from error
    if not 0 < seconds <= LONGEST_S:
        raise typer.BadParameter(f"{text} is not more than 0 and at most {LONGEST_S:.0f}")
    return seconds


Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", parser=_seconds, help="How long a call may take.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with the proto's field names.")
]
SERVER = "127.0.0.1:50051"
TIMEOUT_S = 300.0

_access: ContextVar[Access] = ContextVar("access", default=PLAINTEXT)
_traceparent: ContextVar[str] = ContextVar("traceparent", default="")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stemserve {stemserve.__version__}")
        raise typer.Exit


def access_options(
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="STEMSERVE_API_KEY",
            show_envvar=True,
            metavar="KEY",
            help="Key or token to call with; better in the environment than here.",
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", envvar="STEMSERVE_TLS", help="Call over TLS.")
    ] = False,
    ca: Annotated[
        Path | None,
        typer.Option(envvar="STEMSERVE_CA", help="Authority of the server's certificate, PEM."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(envvar="STEMSERVE_CERTIFICATE", help="Own certificate, PEM.")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(envvar="STEMSERVE_PRIVATE_KEY", help="And its key, PEM.")
    ] = None,
    traceparent: Annotated[
        str,
        typer.Option(
            envvar=PARENT_KEY.upper(),
            show_envvar=True,
            metavar="00-TRACE-SPAN-01",
            help="Span around the calls, as W3C Trace Context has it: a server that traces shows "
            "them there.",
        ),
    ] = "",
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Score and generate with a language model over prefixes that requests share."""
    if (certificate is None) != (private_key is None):
        raise typer.BadParameter(
            "--certificate and --private-key (STEMSERVE_CERTIFICATE, STEMSERVE_PRIVATE_KEY) go "
            "together; give both"
        )
    try:
        access = Access(
            key=api_key, tls=tls, ca=ca, certificate=certificate, private_key=private_key
        )
    except ValueError as error:
        raise typer.BadParameter(f"--api-key (STEMSERVE_API_KEY): {error}") from error
    if traceparent and remote_parent({PARENT_KEY: traceparent}) is None:
        raise typer.BadParameter(
            f"--traceparent (TRACEPARENT) {traceparent!r} is not like 00-TRACE-SPAN-01"
        )
    _access.set(access)
    _traceparent.set(traceparent)


def call(server: str, work: Callable[[Channel], Awaitable[T]]) -> T:
    """The result of `work` on a channel to the server; a failed call ends the command."""
    check_server(server)
    try:
        return asyncio.run(_with_channel(server, work))
    except OSError as error:
        if error.filename is None:  # standard output
            raise
        fail(f"{_option(error.filename)} {error.filename}: {error.strerror}")
    except grpc.aio.AioRpcError as error:
        fail_call(client_error(error), server)


def _option(file: str) -> str:
    """That names a file of the access."""
    access = _access.get()
    named = {"--ca": access.ca, "--certificate": access.certificate}
    return next((flag for flag, path in named.items() if str(path) == file), "--private-key")


def check_server(server: str) -> None:
    """Raises typer.BadParameter for an address that has no port, or is none."""
    try:
        check_target(server)
    except ValueError as error:
        tls = ", and for TLS --tls before the command" if server.startswith("https:") else ""
        raise typer.BadParameter(f"--server {error}{tls}") from error


async def _with_channel(server: str, work: Callable[[Channel], Awaitable[T]]) -> T:
    parent = _traceparent.get()
    headers = (lambda: ((PARENT_KEY, parent),)) if parent else None
    async with open_channel(server, _access.get(), OPTIONS, headers=headers) as channel:
        return await work(channel)
