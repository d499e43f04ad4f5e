"""Envoy itself reads the configurations that the project ships."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from tests.deploy.chart import MATRIX, ROOT, render, the
from tests.service.certificates import Authority

ENVOY = Path(sys.executable).with_name("envoy")


def validate(config: Path) -> None:
    command: list[str | Path] = [
        ENVOY,
        "--mode",
        "validate",
        "--log-level",
        "error",
        "--config-path",
        config,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("row", ["defaults", "node folder", "keys over TLS", "tokens"])
def test_envoy_takes_the_charts_configuration(row: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server", x509.DNSName("x-stemserve.ns.svc"))
    text = the(render(MATRIX[row]), "ConfigMap", "x-stemserve-router")["data"]["envoy.yaml"]
    for name, file in {
        "ca.crt": authority.certificate,
        "tls.crt": identity.certificate,
        "tls.key": identity.private_key,
    }.items():
        text = text.replace(f"/etc/stemserve-tls/{name}", str(file))
    config = tmp_path / "envoy.yaml"
    config.write_text(text)
    validate(config)


def test_envoy_takes_the_configuration_of_compose() -> None:
    validate(ROOT / "deploy" / "compose" / "envoy.yaml")
