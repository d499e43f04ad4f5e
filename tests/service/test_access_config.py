"""Settings of access that cannot work are refused at the start, by name."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from stemserve.service.client import Access
from stemserve.service.config.access import (
    AuthConfig,
    JwtConfig,
    TenantConfig,
    TlsConfig,
    check_access,
)
from stemserve.service.config.error import ConfigError

BY_KEY = AuthConfig(mode="keys")
TENANTS = {
    name: TenantConfig(key_sha256=(hashlib.sha256(name.encode()).hexdigest(),))
    for name in ("search", "mail")
}


@pytest.mark.parametrize(
    ("auth", "tls", "tenants", "problem"),
    [
        (AuthConfig(), TlsConfig(), TENANTS, "tenants need auth.mode"),
        (BY_KEY, TlsConfig(), {}, "needs at least one table"),
        (BY_KEY, TlsConfig(), {"a": TenantConfig()}, "tenants.a.key_sha256 is empty"),
        (BY_KEY, TlsConfig(), {"A!": TENANTS["mail"]}, "a name has up to 63"),
        (BY_KEY, TlsConfig(), {"other": TENANTS["mail"]}, "is not 'other'"),
        (BY_KEY, TlsConfig(), {"a": TENANTS["mail"], "b": TENANTS["mail"]}, "have the same"),
        (AuthConfig(mode="mtls"), TlsConfig(), TENANTS, "needs tls.client_ca"),
    ],
)
def test_settings_of_access_that_cannot_work_are_named(
    auth: AuthConfig, tls: TlsConfig, tenants: dict[str, TenantConfig], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_access(auth, tls, tenants)


def test_bad_files_and_hashes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls.certificate .*none.pem is not a file"):
        TlsConfig(certificate=tmp_path / "none.pem", private_key=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="give both"):
        TlsConfig(certificate=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="auth.jwt.jwks None is not a file"):
        AuthConfig(mode="jwt")
    with pytest.raises(ConfigError, match="algorithms 'HS256' is not one of"):
        JwtConfig(algorithms=("HS256",))
    with pytest.raises(ConfigError, match="stemserve make-key"):
        TenantConfig(key_sha256=("secret",))
    with pytest.raises(ValueError, match="give both"):
        Access(certificate=tmp_path / "a.pem")


@pytest.mark.parametrize(
    "setting",
    [
        {"weight": float("inf")},
        {"weight": float("nan")},
        {"weight": 0.0},
        {"max_priority": -1},
        {"tokens_per_second": float("inf")},
        {"requests_per_second": -1.0},
        {"max_prefix_bytes": -1},
    ],
)
def test_shares_of_a_tenant_that_mean_nothing_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TenantConfig(**setting)
