"""Serve the metrics over HTTP on a port of their own."""

from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from stemserve.service.config.server import ServerConfig
from stemserve.service.serving.server import PortInUse


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
