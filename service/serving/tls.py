"""Transport security of the RPC port, with certificates that may be replaced while it runs."""

import ssl
from pathlib import Path
from typing import Any

import grpc

from stemserve.service.config.access import TlsConfig
from stemserve.service.config.error import ConfigError
from stemserve.service.serving.watched_file import WatchedFile


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """None: plaintext. Each handshake looks for changed files. Raises ConfigError."""
    if config.certificate is None or config.private_key is None:
        return None
    authority = config.client_ca
    _check_pair(config.certificate, config.private_key)
    if authority is not None:
        _check_authority(authority)
    files = _PemFiles(
        certificate=WatchedFile(config.certificate, parse=_pem),
        private_key=WatchedFile(config.private_key, parse=_pem),
        client_ca=None if authority is None else WatchedFile(authority, parse=_pem),
    )
    changed: Any = files.changed_configuration  # the stubs leave None, for no change, out
    return grpc.dynamic_ssl_server_credentials(
        files.configuration(), changed, authority is not None
    )


def _check_pair(certificate: Path, private_key: Path) -> None:
    """gRPC would only say that it cannot listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password is refused; without the argument OpenSSL asks the terminal.
        context.load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls.certificate {certificate} and tls.private_key {private_key} are not a "
            f"certificate in PEM and its key: {error}"
        ) from error


def _check_authority(path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls.client_ca {path} holds no certificate in PEM: {error}") from error


def _pem(text: str) -> bytes:
    """Raises ValueError: what an empty or half-written file holds must not be put in force."""
    if "-----BEGIN " not in text or "-----END " not in text:
        raise ValueError("it holds no PEM block")
    return text.encode()


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
