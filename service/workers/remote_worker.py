"""A worker that somebody else starts and stops, here or on another host."""

import logging
from pathlib import Path

import grpc

from stemserve.service.config.server import WorkerConfig

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

_log = logging.getLogger(__name__)


class RemoteWorker:
    """Its certificates are read when it is made: each new connection to a lost worker makes one."""

    def __init__(self, address: str, config: WorkerConfig) -> None:
        """Raises OSError if a file of `config` cannot be read."""
        self.address = address
        self.credentials = _credentials(config)
        host = address.rpartition(":")[0]
        if self.credentials is None and not address.startswith("unix:") and host not in LOOPBACK:
            _log.warning("worker %s: plaintext; set worker.tls_ca for TLS", address)

    def ended(self) -> str | None:
        return None

    def stop(self, *, grace_s: float) -> None:
        pass

    def kill(self) -> None:
        pass


def _credentials(config: WorkerConfig) -> grpc.ChannelCredentials | None:
    if config.tls_ca is None:
        return None
    return grpc.ssl_channel_credentials(
        _content(config.tls_ca), _content(config.tls_private_key), _content(config.tls_certificate)
    )


def _content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
