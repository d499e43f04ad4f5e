"""Serve the metrics over HTTP on a port of their own."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from prometheus_client import CollectorRegistry, start_http_server

from stemserve.service.config.server import ServerConfig
from stemserve.service.serving.server import PortInUse

NOTES_S = 1.0


def wait_for_notes(loop: asyncio.AbstractEventLoop) -> None:
    """Until calls whose answers went out are counted, which the RPC loop does behind each answer.

    For a thread that scrapes; a loop that is busy for longer than `NOTES_S` is not waited for.
    """
    noted = threading.Event()
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(noted.set)
        noted.wait(NOTES_S)


@contextmanager
def metrics_port(config: ServerConfig, registry: CollectorRegistry) -> Generator[int]:
    """The port that it listens on. Scrapes are answered on a thread, never on the RPC loop."""
    try:
        server, thread = start_http_server(config.metrics_port, config.host, registry)
    except OSError as error:
        raise PortInUse(
            f"cannot listen on {config.host}:{config.metrics_port} ({error.strerror}): "
            "choose another --metrics-port"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
