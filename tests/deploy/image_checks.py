"""The image for a CPU, built and run. `make deploy-check` names this file; `make test` does not."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.deploy.image_rig import (
    CACHE,
    REVISION,
    ROOT,
    TAG,
    Buildah,
    Container,
    build,
    bytes_below,
    files_below,
    lacking,
)
from tests.deploy.test_images import locked
from tests.e2e.conftest import Started, start_server, stemserve_command

__all__ = ["start_server", "stemserve_command"]
WEIGHTS = ROOT / ".cache/models"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
START_S = 120.0
TOLERANCE = 1e-3  # of a log-probability: other threads, other sums
pytestmark = pytest.mark.timeout(3600)


@dataclass(frozen=True, kw_only=True)
class Built:
    root: Path
    config: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    if reason := lacking():
        pytest.skip(reason)
    store = CACHE / "store"
    store.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(store=store)
    started = time.monotonic()
    try:
        build(buildah)
        seconds = time.monotonic() - started
        container = buildah("from", TAG)
        config = json.loads(buildah("inspect", "--type", "image", TAG))["Docker"]["config"]
        yield Built(root=Path(buildah("mount", container)), config=config, seconds=seconds)
        buildah("umount", container)
    finally:
        shutil.rmtree(store)


@pytest.fixture(scope="module")
def container(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """Serves the default model."""
    assert (WEIGHTS / MODEL).is_file(), "make model fetches it"
    cache = tmp_path_factory.mktemp("cache")
    os.chown(cache, 10001, 10001)
    for parent in (cache.parent, *cache.parent.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o011)
    running = Container(root=built.root, config=built.config, cache=cache, weights=WEIGHTS)
    running.start("serve", "--host", "0.0.0.0", "--model", f"/mnt/{MODEL}", "--threads", "1")
    try:
        running.wait_healthy(START_S)
        yield running
    finally:
        running.kill()


def test_the_image_says_what_it_is(built: Built, record_property: Callable[..., None]) -> None:
    record_property("seconds to build, base included", round(built.seconds))
    record_property("MB", round(bytes_below(built.root) / 1e6))
    config = built.config
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["stemserve"]
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"50051/tcp", "50052/tcp", "9400/tcp"}
    labels = config["Labels"]
    assert labels["org.opencontainers.image.revision"] == REVISION
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_it_has_no_weights_no_compiler_and_no_secrets(built: Built) -> None:
    names = {file.name for file in files_below(built.root)}
    assert not [name for name in names if name.endswith((".gguf", ".safetensors"))]
    assert not names & {"cc", "gcc", "g++", "clang", "nvcc", "ld"}
    assert not (built.root / "etc/pip.conf").exists() and not (built.root / "run/secrets").exists()
    passwd = (built.root / "etc/passwd").read_text()
    assert re.search(r"^stemserve:x:10001:10001:.*:/usr/sbin/nologin$", passwd, re.MULTILINE)


def test_its_bill_of_materials_names_all_locked_packages(built: Built) -> None:
    bill = json.loads((built.root / "opt/stemserve/sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    found = {normal(part["name"]): part["version"] for part in bill["components"]}
    expected = {normal(name): version for name, version in locked("cpu.txt").items()}
    assert expected.items() <= found.items()
    assert set(found) - set(expected) == {"stemserve"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_it_runs_as_nobody_and_cannot_write(container: Container) -> None:
    status = container.run("cat", "/proc/self/status").stdout
    assert "Uid:\t10001\t10001" in status and "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status and "CapBnd:\t0000000000000000" in status
    for path in ("/x", "/opt/stemserve/x", "/home/stemserve/x", "/mnt/x"):
        assert container.run("touch", path).returncode, path
    for path in ("/tmp/x", "/home/stemserve/.cache/x"):
        assert not container.run("touch", path).returncode, path


def test_it_answers_the_score_call_of_the_demo(
    container: Container, start_server: Callable[..., Started]
) -> None:
    """As the same model does outside."""
    texts = json.loads((ROOT / "examples/documents.json").read_text())
    query = f"Passage: {texts['documents'][1]['text']}\nThe topic of this passage is:"
    items = [f"--item= {topic}" for topic in texts["topics"]]
    words = ["score", "--json", "--query", query, *items]
    inside = container.run("stemserve", *words)
    assert inside.returncode == 0, inside.stderr
    _, ports = start_server("--model", WEIGHTS / MODEL, "--threads", 1)
    outside = container_less(*words, f"--server=127.0.0.1:{ports['rpc']}")
    np.testing.assert_allclose(scores(inside.stdout), scores(outside), atol=TOLERANCE)


def scores(text: str) -> np.ndarray:
    return np.array(json.loads(text)["scores"])


def container_less(*words: str) -> str:
    from typer.testing import CliRunner

    from stemserve.service.commands.app import app

    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_it_drains_and_ends_on_its_stop_signal(container: Container) -> None:
    """The last test of the module: the server ends."""
    assert container.healthy().returncode == 0
    assert container.process is not None
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(60) == 0
