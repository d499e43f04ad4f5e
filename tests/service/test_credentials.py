"""Signed tokens and client certificates, and the files behind them that change."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.certificates import Authority
from tests.service.serving import BYTE_VOCABULARY, serving

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Access, Client, ClientError
from stemserve.service.config.access import AuthConfig, JwtConfig, TenantConfig, TlsConfig
from stemserve.service.config.error import ConfigError
from stemserve.service.serving.credentials import identification
from stemserve.service.serving.tls import server_credentials
from stemserve.service.serving.watched_file import CHECK_S

MODE = inference_pb2.LogLikelihood()
TENANTS = {"mail": TenantConfig(), "search": TenantConfig()}


def byte_engine() -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY))


class Issuer:
    """Signs tokens, and publishes its key."""

    def __init__(self, folder: Path) -> None:
        self.jwks = folder / "jwks.json"
        self.rotate("first")

    def rotate(self, key_id: str) -> None:
        self._key, self._key_id = ec.generate_private_key(ec.SECP256R1()), key_id
        public: dict[str, str] = ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        self.jwks.write_text(json.dumps({"keys": [public | {"kid": key_id, "alg": "ES256"}]}))

    def token(self, **claims: Any) -> str:
        usual = {"iss": "us", "aud": "stemserve", "tenant": "mail", "exp": time.time() + 60}
        kept = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode(kept, self._key, algorithm="ES256", headers={"kid": self._key_id})

    @property
    def config(self) -> AuthConfig:
        return AuthConfig(
            mode="jwt", jwt=JwtConfig(jwks=self.jwks, issuer="us", audience="stemserve")
        )


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": time.time() - 3600}, "expired"),
        ({"exp": None}, "bad_signature"),
        ({"aud": "others"}, "bad_signature"),
        ({"iss": "others"}, "bad_signature"),
        ({"tenant": "nobody"}, "unknown_tenant"),
        ({"tenant": ["mail"]}, "unknown_tenant"),
        ({"tenant": None}, "bad_signature"),
    ],
)
async def test_a_token_that_is_not_for_us_is_refused(
    tmp_path: Path, claims: dict[str, Any], reason: str
) -> None:
    issuer = Issuer(tmp_path)
    access = Access(key=issuer.token(**claims))
    async with serving(byte_engine(), auth=issuer.config, tenants=TENANTS, access=access) as served:
        with pytest.raises(ClientError) as refused:
            await served.client.score(["a"], MODE, query="q")
        assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        assert served.metric("auth_failures_total", reason=reason) == 1


async def test_tokens_of_another_key_or_algorithm_are_refused(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    claims = {"iss": "us", "aud": "stemserve", "tenant": "mail", "exp": time.time() + 60}
    forged = [
        jwt.encode(claims, "x" * 32, algorithm="HS256", headers={"kid": "first"}),
        jwt.encode(claims, "", algorithm="none", headers={"kid": "first"}),
        jwt.encode(
            claims, ec.generate_private_key(ec.SECP256R1()), "ES256", headers={"kid": "first"}
        ),
        jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), "ES256"),
        "not.a.token",
        "",
    ]
    async with serving(byte_engine(), auth=issuer.config, tenants=TENANTS) as served:
        for token in forged:
            async with Client(served.target, access=Access(key=token)) as client:
                with pytest.raises(ClientError) as refused:
                    await client.score(["a"], MODE, query="q")
                assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        async with Client(served.target, access=Access(key=issuer.token())) as client:
            assert await client.score(["a"], MODE, query="q")


async def test_the_issuers_new_keys_are_read_while_the_server_runs(tmp_path: Path) -> None:
    """And a key that is withdrawn signs no more."""
    issuer = Issuer(tmp_path)
    withdrawn = Access(key=issuer.token())
    async with serving(
        byte_engine(), auth=issuer.config, tenants=TENANTS, access=withdrawn
    ) as served:
        assert await served.client.score(["a"], MODE, query="q")
        issuer.rotate("second")
        async with Client(served.target, access=Access(key=issuer.token())) as current:
            await until_answered(current)
        with pytest.raises(ClientError) as refused:
            await served.client.score(["a"], MODE, query="q")
        assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED


async def until_answered(client: Client, patience_s: float = 20.0) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            await client.score(["a"], MODE, query="q")
            return
        except ClientError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)


def tls_of(authority: Authority, *, mutual: bool = False) -> TlsConfig:
    server = authority.issue("server", x509.DNSName("localhost"))
    return TlsConfig(
        certificate=server.certificate,
        private_key=server.private_key,
        client_ca=authority.certificate if mutual else None,
    )


async def test_certificates_name_their_tenants(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    stranger = Authority(tmp_path, "stranger")
    tenants = {
        "search": TenantConfig(subjects=("spiffe://here/search",)),
        "mail": TenantConfig(subjects=("mail.internal",)),
    }
    engine = byte_engine()
    async with serving(
        engine, auth=AuthConfig(mode="mtls"), tls=tls_of(authority, mutual=True), tenants=tenants
    ) as served:
        known = (
            x509.UniformResourceIdentifier("spiffe://here/search"),
            x509.DNSName("mail.internal"),
        )
        for subject in known:
            access = client_access(authority, authority, "known", subject)
            async with Client(served.target, access=access) as client:
                assert await client.score(["a"], MODE, query="q")
        for name in (x509.DNSName("other.internal"), None):
            access = client_access(authority, authority, "three", name)
            async with Client(served.target, access=access) as client:
                with pytest.raises(ClientError) as refused:
                    await client.score(["a"], MODE, query="q")
                assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        unknown = client_access(stranger, authority, "four", x509.DNSName("mail.internal"))
        for access in (unknown, Access(ca=authority.certificate)):
            async with Client(served.target, access=access, timeout_s=5.0) as client:
                with pytest.raises(ClientError) as refused:
                    await client.score(["a"], MODE, query="q")
                assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert [job.tenant for job in engine.jobs] == ["search", "mail"]


def client_access(
    signer: Authority, believed: Authority, name: str, subject: x509.GeneralName | None
) -> Access:
    identity = signer.issue(name, *([subject] if subject else []))
    return Access(
        ca=believed.certificate,
        certificate=identity.certificate,
        private_key=identity.private_key,
    )


async def test_a_new_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(byte_engine(), tls=tls_of(authority)) as served:
        async with Client(served.target, access=Access(ca=authority.certificate)) as client:
            assert await client.score(["a"], MODE, query="q")
        second = Authority(tmp_path, "second")
        second.issue("server", x509.DNSName("localhost"))
        async with Client(served.target, access=Access(ca=second.certificate)) as client:
            await until_answered(client)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": []}', '{"keys": [{"kty": "RSA"}]}'])
def test_a_server_does_not_start_without_keys_of_the_issuer(tmp_path: Path, content: str) -> None:
    issuer = Issuer(tmp_path)
    issuer.jwks.write_text(content)
    with pytest.raises(ConfigError, match="jwks.json is no set of keys"):
        identification(issuer.config, TENANTS)


def test_a_server_does_not_start_with_files_that_are_no_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine, other = authority.issue("mine"), authority.issue("other")
    files = {"certificate": mine.certificate, "private_key": mine.private_key}
    assert server_credentials(TlsConfig(**files, client_ca=authority.certificate)) is not None
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\x30\x82\xff")
    empty.write_text("")
    for wrong in (
        {"certificate": binary},
        {"certificate": empty},
        {"private_key": other.private_key},
        {"private_key": mine.certificate},
        {"client_ca": empty},
        {"client_ca": binary},
    ):
        with pytest.raises(ConfigError, match=f"tls.*{next(iter(wrong.values())).name}"):
            server_credentials(TlsConfig(**{**files, **wrong}))


async def test_an_authority_that_is_half_written_is_not_put_in_force(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("localhost", x509.DNSName("localhost"))
    caller = authority.issue("mail", x509.DNSName("mail.example"))
    tls = TlsConfig(
        certificate=server.certificate,
        private_key=server.private_key,
        client_ca=authority.certificate,
    )
    access = Access(
        ca=tmp_path / "copy.pem", certificate=caller.certificate, private_key=caller.private_key
    )
    (tmp_path / "copy.pem").write_bytes(authority.certificate.read_bytes())
    tenants = {"mail": TenantConfig(subjects=("mail.example",))}
    auth = AuthConfig(mode="mtls")
    async with serving(byte_engine(), auth=auth, tls=tls, tenants=tenants) as served:
        authority.certificate.write_text("")
        await asyncio.sleep(CHECK_S)
        port = served.target.rpartition(":")[2]
        async with Client(f"localhost:{port}", access=access) as client:
            await client.score(["a"], MODE, query="q")
