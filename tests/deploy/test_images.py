"""What can be checked of the images and of compose.yaml without a container engine."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.chart import ROOT, render, the
from typer.testing import CliRunner

from stemserve.service.commands.app import app
from stemserve.service.config.sources import read_settings

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
REQUIREMENT = re.compile(r"^([a-z0-9-]+)==(\S+) \\$")


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_nobody_in_particular(target: str) -> None:
    stage = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
    user = the(render({}), "StatefulSet")["spec"]["template"]["spec"]["securityContext"]
    assert f"--uid {user['runAsUser']}" in stage
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in stage
    for line in ("HEALTHCHECK", "STOPSIGNAL SIGTERM", 'ENTRYPOINT ["stemserve"]'):
        assert f"\n{line}" in stage
    assert stage.count("org.opencontainers.image.") == 5


def locked(name: str) -> dict[str, str]:
    """Versions by package; every one has a hash."""
    versions = dict[str, str]()
    blocks = re.split(r"\n(?=[a-z])", (DEPLOY / "requirements" / name).read_text().strip())
    for block in blocks:
        first, *hashes = block.splitlines()
        found = REQUIREMENT.match(first)
        assert found and hashes, block
        assert all(re.match(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$", line) for line in hashes)
        versions[found[1]] = found[2]
    return versions


def test_locked_requirements_hold_every_dependency() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["tracing"]
    names = {re.split(r"[\[<>=;]", line)[0].strip().lower() for line in wanted}
    assert names <= set(locked("cpu.txt"))
    assert names | {"flashinfer-python", "triton"} <= set(locked("cuda.txt"))
    assert not [name for name in locked("cpu.txt") if name.startswith(("nvidia", "cuda"))]
    assert "setuptools" in locked("build.txt") and "cyclonedx-bom" in locked("sbom.txt")
    assert "pip" in locked("cpu.txt") and "pip" in locked("cuda.txt")  # fetches the default model


def test_a_wheel_is_built_from_what_the_image_copies(tmp_path: Path) -> None:
    stage = DOCKERFILE.split(" AS wheel\n")[1].split("\nFROM ")[0]
    allowed = set((DEPLOY / "Dockerfile.dockerignore").read_text().replace("!", "").splitlines())
    source = tmp_path / "source"
    source.mkdir()
    for line in re.findall(r"^COPY (.*)$", stage, re.MULTILINE):
        *names, _ = line.split()
        for name in names:
            assert name in allowed or str(Path(name).parent) in allowed, name
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, symlinks=True)
            else:
                shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("service/cli.py", "proto/v1/inference_pb2.py", "worker/__main__.py",
                 "kernels/costs/nvidia-h200.json"):  # fmt: skip
        assert f"stemserve/{name}" in names, [n for n in names if "costs" in n]


def compose_file(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def test_compose_routes_as_the_chart_does() -> None:
    chart = the(render({"workload": "Deployment"}), "ConfigMap", "x-stemserve-router")
    text = chart["data"]["envoy.yaml"].replace("x-stemserve-servers.ns.svc", "server")
    assert compose_file("compose/envoy.yaml") == yaml.safe_load(text)


def test_compose_names_what_is_there() -> None:
    services = compose_file("compose.yaml")["services"]
    volumes = [mount.split(":")[0] for s in services.values() for mount in s.get("volumes", [])]
    for path in volumes:
        assert not path.startswith(".") or (DEPLOY / path).exists(), path
    jobs = compose_file("compose/prometheus.yaml")["scrape_configs"]
    assert jobs[0]["dns_sd_configs"][0]["names"] == ["server"]
    assert "envoy" in services and jobs[1]["static_configs"][0]["targets"] == ["envoy:9902"]
    sources = {s["uid"]: s for s in compose_file("compose/grafana-datasource.yaml")["datasources"]}
    assert sources["prometheus"]["url"] == "http://prometheus:9090" and "prometheus" in services
    (link,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": "jaeger"}
    assert sources["jaeger"]["url"] == "http://jaeger:16686"
    assert services["jaeger"]["profiles"] == ["tracing"]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def environment(server: Any, *, given: Mapping[str, str]) -> dict[str, str]:
    """As compose fills `${NAME:-default}` in."""
    pattern = re.compile(r"\$\{(\w+):-([^}]*)\}")
    return {
        name: pattern.sub(lambda found: given.get(found[1]) or found[2], str(text))
        for name, text in server["environment"].items()
    }


def test_compose_starts_the_image_with_options_that_the_server_has() -> None:
    server = compose_file("compose.yaml")["services"]["server"]
    done = CliRunner().invoke(app, [*server["command"], "--print-config"])
    assert done.exit_code == 0, done.output
    read_settings(file=None, environment=environment(server, given={}), flags={})
    given = {"OTLP_ENDPOINT": "http://jaeger:4317", "LOG_FORMAT": "json"}
    read = read_settings(file=None, environment=environment(server, given=given), flags={})
    assert read.config.tracing.enabled and read.config.log_format == "json"
    settings = tomllib.loads(done.output)["server"]
    grace = float(server["stop_grace_period"].removesuffix("s"))
    assert settings["drain_s"] + settings["drain_delay_s"] + 5 <= grace
