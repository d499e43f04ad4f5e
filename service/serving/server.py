"""The gRPC servers: one port for everything, one plaintext port for health only."""

import errno
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from stemserve.service.config.server import ServerConfig
from stemserve.service.limits import Limits
from stemserve.service.serving import reflection
from stemserve.service.serving.health import SERVICE_NAME as HEALTH_SERVICE
from stemserve.service.serving.health import Health

SPARE_STREAMS = 128  # of a connection: for health, and for refusals
FOREVER_MS = 2**31 - 1  # as gRPC understands it
PING_JITTER = 0.9  # of their interval, pings that were sent on time arrive apart at least

# After a drain nothing should run; what still does is cut.
STOP_GRACE_S = 1.0


class PortInUse(Exception):
    """A port that cannot be listened on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPorts:
    host: str
    port: int
    health_port: int


class Servers:
    """Both servers, bound but not started."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        limits: Limits,
        health: Health,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`credentials` None: plaintext."""
        options = transport_options(config, limits)
        self.rpc = grpc.aio.server(interceptors=interceptors, options=options)
        # The first interceptor answers bytes that are no message, here too.
        self._health = grpc.aio.server(interceptors=interceptors[:1], options=options)
        for server in (self.rpc, self._health):
            server.add_generic_rpc_handlers((health.handler(),))
        self.ports = BoundPorts(
            host=config.host,
            port=bind(self.rpc, config.host, config.port, "--port", credentials),
            health_port=bind(self._health, config.host, config.health_port, "--health-port"),
        )

    def reflect(self, services: Sequence[str]) -> None:
        self.rpc.add_generic_rpc_handlers(reflection.handlers([*services, HEALTH_SERVICE]))

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Health is answered until the very end, so that a probe sees NOT_SERVING, not an error."""
        await self._health.start()
        try:
            await self.rpc.start()
            try:
                yield
            finally:
                await self.rpc.stop(STOP_GRACE_S)
        finally:
            await self._health.stop(STOP_GRACE_S)


def transport_options(config: ServerConfig, limits: Limits) -> list[tuple[str, Any]]:
    options = [
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # Between the two gRPC refuses at random: a limit that is not one number.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # Of one connection. Calls above it wait in the client, which never hears of a refusal.
        ("grpc.max_concurrent_streams", limits.max_concurrent_calls + SPARE_STREAMS),
        # Without this a second server would silently share the port.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _milliseconds(config.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(config.keepalive_timeout_s)),
        # What counts for a ping that was sent; else it is a minute whatever the line above says.
        ("grpc.http2.ping_timeout_ms", _milliseconds(config.keepalive_timeout_s)),
        # Clients may ping an idle connection too; the default answers that with GOAWAY.
        ("grpc.keepalive_permit_without_calls", 1),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            _milliseconds(PING_JITTER * config.least_ping_interval_s),
        ),
        ("grpc.http2.max_ping_strikes", config.max_ping_strikes),
    ]
    if config.max_connection_age_s:
        options.append(("grpc.max_connection_age_ms", _milliseconds(config.max_connection_age_s)))
        grace_ms = _milliseconds(config.max_connection_age_grace_s) or FOREVER_MS
        options.append(("grpc.max_connection_age_grace_ms", grace_ms))
    return options


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    option: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """The port. Raises PortInUse, which names the option."""
    address = f"{host}:{port}"
    try:
        _check_free(host, port)
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except (socket.gaierror, UnicodeError) as error:  # the latter of no name at all
        raise PortInUse(f"cannot listen on {address}: {host!r} names no address here") from error
    except (OSError, RuntimeError) as error:
        raise PortInUse(
            f"cannot listen on {address}: is another server running, or the address another "
            f"host's? choose another {option}, or --host"
        ) from error


def _check_free(host: str, port: int) -> None:
    """Raises OSError. gRPC would write lines of its own about a port in use to standard error."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC listens: connections that linger from an earlier server are no hindrance.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            # Other errors are not for here to judge: one of several addresses may be enough.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
