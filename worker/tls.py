"""Transport security of a worker that listens on a network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """In PEM. Each handshake reads them, so they may be replaced; a service makes one handshake."""

    certificate: Path
    private_key: Path
    client_ca: Path | None  # demand a client certificate that this signed

    def missing(self) -> str | None:
        """The flag and the path of a file that is not there."""
        named = {
            "--tls-certificate": self.certificate,
            "--tls-private-key": self.private_key,
            "--tls-client-ca": self.client_ca,
        }
        wrong = (f"{flag} {path}" for flag, path in named.items() if path and not path.is_file())
        return next(wrong, None)

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError if a file cannot be read."""
        fetch: Any = self._configuration  # the stubs want a type that gRPC never makes
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, self.client_ca is not None
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self.private_key.read_bytes(), self.certificate.read_bytes())
        authority = None if self.client_ca is None else self.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authority)
