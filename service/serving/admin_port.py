"""A port for the Admin service alone, which nobody outside this machine reaches."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from stemserve.service.config.server import ServerConfig
from stemserve.service.limits import Limits
from stemserve.service.serving.server import STOP_GRACE_S, bind, transport_options

LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def admin_port(
    config: ServerConfig,
    add_service: Callable[[grpc.aio.Server], None],
    *,
    limits: Limits,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> AsyncGenerator[int | None]:
    """The port that it listens on; None: it is off. Raises PortInUse."""
    if config.admin_port is None:
        yield None
        return
    server = grpc.aio.server(interceptors=interceptors, options=transport_options(config, limits))
    add_service(server)
    port = bind(server, LOOPBACK, config.admin_port, "--admin-port")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(STOP_GRACE_S)
