"""Transport security of the RPC port, with certificates that may be replaced while it runs."""

from typing import Any

import grpc

from stemserve.service.access_config import TlsConfig
from stemserve.service.serving.watched_file import WatchedFile


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """None: plaintext. Each handshake looks for changed files. Raises OSError."""
    if config.certificate is None or config.private_key is None:
        return None
    authority = config.client_ca
    files = _PemFiles(
        certificate=WatchedFile(config.certificate, parse=str.encode),
        private_key=WatchedFile(config.private_key, parse=str.encode),
        client_ca=None if authority is None else WatchedFile(authority, parse=str.encode),
    )
    changed: Any = files.changed_configuration  # the stubs leave None, for no change, out
    return grpc.dynamic_ssl_server_credentials(
        files.configuration(), changed, authority is not None
    )


class _PemFiles:
    """Asked by gRPC's own threads, once a handshake."""

    def __init__(
        self,
        *,
        certificate: WatchedFile[bytes],
        private_key: WatchedFile[bytes],
        client_ca: WatchedFile[bytes] | None,
    ) -> None:
        self._certificate = certificate
        self._private_key = private_key
        self._client_ca = client_ca
        self._given = self._content()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        key, certificate, authority = self._given
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        content = self._content()
        if content == self._given:
            return None
        self._given = content
        return self.configuration()

    def _content(self) -> tuple[bytes, bytes, bytes | None]:
        authority = None if self._client_ca is None else self._client_ca.value
        return self._private_key.value, self._certificate.value, authority
