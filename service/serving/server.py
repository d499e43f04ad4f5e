"""The gRPC servers: one port for everything, one plaintext port for health only."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from stemserve.service.config import ServerConfig
from stemserve.service.serving import reflection
from stemserve.service.serving.health import SERVICE_NAME as HEALTH_SERVICE
from stemserve.service.serving.health import Health

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
        max_message_bytes: int,
        health: Health,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`credentials` None: plaintext."""
        options = _options(max_message_bytes)
        self.rpc = grpc.aio.server(interceptors=interceptors, options=options)
        # The first interceptor answers bytes that are no message, here too.
        self._health = grpc.aio.server(interceptors=interceptors[:1], options=options)
        for server in (self.rpc, self._health):
            server.add_generic_rpc_handlers((health.handler(),))
        self.ports = BoundPorts(
            host=config.host,
            port=_bind(self.rpc, config.host, config.port, "--port", credentials),
            health_port=_bind(self._health, config.host, config.health_port, "--health-port"),
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


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Without this a second server would silently share the port.
        ("grpc.so_reuseport", 0),
        # Clients may ping an idle connection every 10 s; the default answers that with GOAWAY.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


def _bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    option: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    address = f"{host}:{port}"
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise PortInUse(
            f"cannot listen on {address}: is another server running? choose another {option}"
        ) from error
