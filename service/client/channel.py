"""Open a channel to a server: plaintext or TLS, with a key or token if callers are told apart."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from stemserve.service.metadata_keys import ROUTING_KEY
from stemserve.service.target import check_target

MAX_MESSAGE_BYTES = 64 << 20
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": ""}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # else a minute, whatever the line above says
    ("grpc.service_config", json.dumps(RETRIES)),
)
# Each server has points on a ring in proportion to its weight; a key goes to the next one.
HASHED = {
    "loadBalancingConfig": [
        {
            "ring_hash_experimental": {
                "minRingSize": 1024,
                "maxRingSize": 4096,
                "requestHashHeader": ROUTING_KEY,
            }
        }
    ]
}
HASH_FLAG = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a client proves who it is, and whom it believes."""

    key: str | None = None  # a static key, or a signed token
    tls: bool = False
    ca: Path | None = None  # PEM; believe servers that this signed, not the system's authorities
    certificate: Path | None = None  # PEM, of this client
    private_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("a client certificate needs its private key: give both")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("the key has a line end or another character that no header may have")

    @property
    def encrypts(self) -> bool:
        return self.tls or self.ca is not None or self.certificate is not None


PLAINTEXT = Access()


Headers = Callable[[], Sequence[tuple[str, str]]]  # metadata for a call that is about to be made


def options_of(*, hashes: bool) -> Sequence[tuple[str, Any]]:
    """Of a channel; `hashes`: to one of several servers by the key of the call's prefix.

    gRPC takes the name of the header only where its environment says so.
    """
    if not hashes:
        return OPTIONS
    os.environ[HASH_FLAG] = "true"
    config = ("grpc.service_config", json.dumps(RETRIES | HASHED))
    return [*(option for option in OPTIONS if option[0] != config[0]), config]


def open_channel(
    target: str,
    access: Access,
    options: Sequence[tuple[str, Any]],
    *,
    headers: Headers | None = None,
) -> grpc.aio.Channel:
    """Raises ValueError for a target without a port, OSError if a file of `access` is bad."""
    check_target(target)
    interceptors = [] if headers is None else _adding(headers)
    if access.key is not None:
        bearer = (("authorization", f"Bearer {access.key}"),)
        interceptors += _adding(lambda: bearer)
    if not access.encrypts:
        return grpc.aio.insecure_channel(target, options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(
        _content(access.ca), _content(access.private_key), _content(access.certificate)
    )
    return grpc.aio.secure_channel(target, credentials, options, interceptors=interceptors)


def _content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def _adding(headers: Headers) -> list[Any]:
    """gRPC wants an interceptor of its own for each kind of call."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    bases: Sequence[Any] = (
        grpc.aio.UnaryUnaryClientInterceptor,
        grpc.aio.UnaryStreamClientInterceptor,
        grpc.aio.StreamUnaryClientInterceptor,
        grpc.aio.StreamStreamClientInterceptor,
    )

    async def intercept(_: Any, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *headers())
        return await continuation(details._replace(metadata=metadata), request)

    return [
        type(f"Adding_{kind}", (base,), {f"intercept_{kind}": intercept})()
        for kind, base in zip(kinds, bases, strict=True)
    ]
