"""Find out who a caller is: by a static key, a signed token or a client certificate."""

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import jwt
from jwt.types import Options

from stemserve.service.config.access import AuthConfig, JwtConfig, TenantConfig
from stemserve.service.config.error import ConfigError
from stemserve.service.errors import Unauthenticated
from stemserve.service.metrics.labels import AUTH_FAILURES
from stemserve.service.serving.watched_file import WatchedFile

BEARER = "bearer "
NO_CREDENTIAL, UNKNOWN_TENANT, BAD_SIGNATURE, EXPIRED, NO_CERTIFICATE = AUTH_FAILURES

Tenants = Mapping[str, TenantConfig]
SUBJECT_PROPERTIES = ("peer_uri", "peer_dns")  # names of gRPC's authentication context


class Presented(Protocol):
    """What came with a call."""

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def certificate(self) -> Mapping[str, Iterable[bytes]]: ...


Identify = Callable[[Presented], str]  # the tenant; raises Unauthenticated


def identification(auth: AuthConfig, tenants: Tenants) -> Identify | None:
    """How callers are told apart; None: they are not."""
    match auth.mode:
        case "none":
            return None
        case "keys":
            return KeyHolders(tenants)
        case "jwt":
            return TokenHolders(auth.jwt, tenants)
        case "mtls":
            return CertificateHolders(tenants)


class KeyHolders:
    """Static keys, of which only the SHA-256 is kept.

    Keys are random and long (`stemserve make-key`), so a plain hash is enough.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._hashes = [
            (bytes.fromhex(value), name)
            for name, tenant in tenants.items()
            for value in tenant.key_sha256
        ]

    def __call__(self, presented: Presented) -> str:
        digest = hashlib.sha256(bearer(presented).encode()).digest()
        # All are compared, so that the time says nothing about which one was close.
        found = [name for known, name in self._hashes if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthenticated("the key is not known", reason=UNKNOWN_TENANT)
        return found[0]


class TokenHolders:
    """JSON Web Tokens (RFC 7519) that a configured issuer signed for this audience."""

    def __init__(self, config: JwtConfig, tenants: Tenants) -> None:
        if config.jwks is None:
            raise ConfigError("tokens need the issuer's keys, auth.jwt.jwks")
        self._config = config
        self._tenants = tenants
        try:
            self._keys = WatchedFile(config.jwks, parse=_key_set)
        except (OSError, ValueError, jwt.PyJWTError) as error:
            raise ConfigError(f"auth.jwt.jwks {config.jwks} is no set of keys: {error}") from error

    def __call__(self, presented: Presented) -> str:
        claims = self._claims(bearer(presented))
        tenant = claims.get(self._config.tenant_claim)
        if not isinstance(tenant, str) or tenant not in self._tenants:
            raise Unauthenticated("the token is of no tenant here", reason=UNKNOWN_TENANT)
        return tenant

    def _claims(self, token: str) -> dict[str, Any]:
        config = self._config
        options: Options = {"require": ["exp", "iss", "aud", config.tenant_claim]}
        try:
            return jwt.decode(
                token,
                self._key(token),
                algorithms=list(config.algorithms),
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options=options,
            )
        except jwt.ExpiredSignatureError as error:
            message = "the token has expired; get a new one"
            raise Unauthenticated(message, reason=EXPIRED) from error
        except jwt.PyJWTError as error:
            raise Unauthenticated(
                f"the token is not valid: {error}", reason=BAD_SIGNATURE
            ) from error

    def _key(self, token: str) -> jwt.PyJWK:
        key_id = jwt.get_unverified_header(token).get("kid")
        keys = self._keys.value.keys
        if key_id is None and len(keys) == 1:
            return keys[0]
        for key in keys:
            if key.key_id == key_id:
                return key
        raise Unauthenticated("the token's key is not one of the issuer's", reason=BAD_SIGNATURE)


class CertificateHolders:
    """Client certificates, by their DNS and URI names. TLS has verified the chain."""

    def __init__(self, tenants: Tenants) -> None:
        self._names = {
            subject: name for name, tenant in tenants.items() for subject in tenant.subjects
        }

    def __call__(self, presented: Presented) -> str:
        certificate = presented.certificate
        subjects = [
            subject.decode(errors="replace")
            for name in SUBJECT_PROPERTIES
            for subject in certificate.get(name, ())
        ]
        if not subjects:
            raise Unauthenticated(
                "the connection has no client certificate with a DNS or URI name",
                reason=NO_CERTIFICATE,
            )
        found = {self._names[subject] for subject in subjects if subject in self._names}
        if len(found) != 1:
            raise Unauthenticated("the certificate is of no tenant here", reason=UNKNOWN_TENANT)
        return found.pop()


def _key_set(text: str) -> jwt.PyJWKSet:
    """Raises ValueError or PyJWTError."""
    found: Any = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return jwt.PyJWKSet.from_dict(cast(dict[str, Any], found))


def bearer(presented: Presented) -> str:
    value = presented.metadata.get("authorization", "")
    if value[: len(BEARER)].lower() != BEARER:
        raise Unauthenticated(
            "send the metadata `authorization: Bearer ...` with each call", reason=NO_CREDENTIAL
        )
    return value[len(BEARER) :].strip()
