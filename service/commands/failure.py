"""End a command with one line that says what happened and what to do."""

from typing import NoReturn

import grpc
import typer
from rich.console import Console

from stemserve.service.client.errors import ClientError

ADVICE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "allow more time with --timeout",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "send less at once",
    grpc.StatusCode.UNAUTHENTICATED: "give --api-key or STEMSERVE_API_KEY",
    grpc.StatusCode.NOT_FOUND: "`stemserve prefixes list` and `tries list` show those there are",
    grpc.StatusCode.INTERNAL: "see the server's log",
}


def say(message: str) -> None:
    """A line on standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"stemserve: {message}", markup=False, style="red"
    )


def fail(message: str) -> NoReturn:
    say(message)
    raise typer.Exit(1)


# What gRPC itself says at a port that is not ours.
OTHER_PORTS = ("Method not found", "HTTP/2")
OTHER_PORT_ADVICE = "that is not the gRPC port; the server's first line names it"
# A TLS port hangs up on a caller in plaintext.
HANG_UP = ("Socket closed", "Connection reset")
HANG_UP_ADVICE = (
    "is it a stemserve server? one with TLS needs --tls or --ca before the command, one that "
    "demands certificates --certificate and --private-key"
)
CERTIFICATE_ADVICE = "--certificate and --private-key give another"
NO_TRUST = ("handshake",)
NO_TRUST_ADVICE = (
    "--ca names who signed the server's certificate; a server that demands one of callers needs "
    "--certificate and --private-key; one without TLS none of them"
)
# What a caller over TLS finds in the answer of a plaintext port.
NO_TLS = "WRONG_VERSION_NUMBER"
NO_TLS_ADVICE = (
    "no TLS on that port: leave out --tls, --ca, --certificate and --private-key, and unset "
    "STEMSERVE_TLS, STEMSERVE_CA, STEMSERVE_CERTIFICATE and STEMSERVE_PRIVATE_KEY"
)


def fail_call(error: ClientError, server: str) -> NoReturn:
    if NO_TLS in error.message:
        fail(f"{server}: {error.code.name}: {NO_TLS_ADVICE}")
    advice = ADVICE.get(error.code)
    if any(words in error.message for words in OTHER_PORTS):
        advice = OTHER_PORT_ADVICE
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        if any(words in error.message for words in HANG_UP):
            advice = HANG_UP_ADVICE
        if any(words in error.message for words in NO_TRUST):
            advice = NO_TRUST_ADVICE
    if error.code is grpc.StatusCode.UNAUTHENTICATED and "certificate" in error.message:
        advice = CERTIFICATE_ADVICE
    if error.reason == "NOT_READY":
        advice = None  # the message says it
    if error.retry_after_s is not None:
        advice = f"retry in {error.retry_after_s:g} s"
    fail(f"{server}: {error}" + (f"; {advice}" if advice else ""))
