"""Who may call, over which transport, and with what share of the server."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stemserve.service.config.error import ConfigError

STRICT = ConfigDict(extra="forbid")
TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
KEY_HASH = re.compile(r"[0-9a-f]{64}")
UNNAMED = "other"  # what a metric calls callers without a tenant
ASYMMETRIC = ("RS256", "RS384", "RS512", "PS256", "PS384", "ES256", "ES384", "EdDSA")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files in PEM; each is read again when it changes."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None  # demand client certificates that this signed

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigError("tls.certificate and tls.private_key go together; give both")
        if self.client_ca is not None and self.certificate is None:
            raise ConfigError("tls.client_ca needs tls.certificate and tls.private_key")
        for name in ("certificate", "private_key", "client_ca"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(f"tls.{name} {path} is not a file")

    @property
    def enabled(self) -> bool:
        return self.certificate is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """Which tokens in `authorization: Bearer` metadata are believed."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    jwks: Path | None = None  # JSON Web Key Set of the issuer, read again when it changes
    issuer: str = ""
    audience: str = ""
    tenant_claim: str = "tenant"
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    leeway_s: float = 30.0

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            if algorithm not in ASYMMETRIC:
                raise ConfigError(
                    f"auth.jwt.algorithms {algorithm!r} is not one of {', '.join(ASYMMETRIC)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    mode: Literal["none", "keys", "jwt", "mtls"] = "none"
    jwt: JwtConfig = field(default_factory=JwtConfig)

    def __post_init__(self) -> None:
        if self.mode != "jwt":
            return
        if self.jwt.jwks is None or not self.jwt.jwks.is_file():
            raise ConfigError(
                f"auth.jwt.jwks {self.jwt.jwks} is not a file; auth.mode jwt needs it"
            )
        if not self.jwt.issuer or not self.jwt.audience or not self.jwt.algorithms:
            raise ConfigError("auth.mode jwt needs auth.jwt.issuer, audience and algorithms")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """0 of a quota means none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    key_sha256: tuple[str, ...] = ()  # of its keys, in hex; several while one is replaced
    subjects: tuple[str, ...] = ()  # DNS or URI names in its client certificates
    group: str = ""  # sharing group: its tenants share what they register as shared; empty: none
    weight: float = 1.0  # share of the engine beside other tenants that wait
    max_priority: int = 0  # of its calls: those of higher priority go before all shares
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0  # that have to be computed, and generated ones
    max_prefix_bytes: int = 0  # of KV that its registered prefixes take
    max_trie_bytes: int = 0  # of memory that its tries take, uploads included

    def __post_init__(self) -> None:
        for value in self.key_sha256:
            if not KEY_HASH.fullmatch(value):
                raise ConfigError(
                    "key_sha256 must be 64 lower-case hex digits; stemserve make-key prints them"
                )
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"weight {self.weight} must be a number more than 0")
        if self.max_priority < 0:
            raise ConfigError(
                f"max_priority {self.max_priority} must be 0, which calls have, or more"
            )
        quotas = (
            self.requests_per_second,
            self.tokens_per_second,
            self.max_prefix_bytes,
            self.max_trie_bytes,
        )
        if any(not 0 <= quota < math.inf for quota in quotas):
            raise ConfigError("quotas of a tenant must be 0 (none) or more")


def check_access(auth: AuthConfig, tls: TlsConfig, tenants: Mapping[str, TenantConfig]) -> None:
    """What no section can see alone. Raises ConfigError."""
    if auth.mode == "none":
        if tenants:
            raise ConfigError("tenants need auth.mode keys, jwt or mtls: nobody is asked who it is")
        return
    if not tenants:
        raise ConfigError(f"auth.mode {auth.mode} needs at least one table [tenants.NAME]")
    if auth.mode == "mtls" and tls.client_ca is None:
        raise ConfigError("auth.mode mtls needs tls.client_ca")
    for name, tenant in tenants.items():
        if not TENANT_NAME.fullmatch(name) or name == UNNAMED:
            raise ConfigError(
                f"tenants.{name}: a name has up to 63 of a-z, 0-9, - and _, and is not {UNNAMED!r}"
            )
        if auth.mode == "keys" and not tenant.key_sha256:
            raise ConfigError(f"tenants.{name}.key_sha256 is empty; stemserve make-key makes a key")
        if auth.mode == "mtls" and not tenant.subjects:
            raise ConfigError(
                f"tenants.{name}.subjects is empty; name what its certificate carries"
            )
    _check_unique("key_sha256", tenants)
    _check_unique("subjects", tenants)


def _check_unique(field_name: str, tenants: Mapping[str, TenantConfig]) -> None:
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        for value in getattr(tenant, field_name):
            if owners.setdefault(value, name) != name:
                raise ConfigError(f"tenants {owners[value]} and {name} have the same {field_name}")
