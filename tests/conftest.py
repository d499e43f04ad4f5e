"""What tests of all folders share: the default model, and workers that compute nothing."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FAKE_WORKER = Path(__file__).parent / "fake_worker.py"
DEFAULT_MODEL = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """SmolLM2-135M-Instruct, which `make model` fetches."""
    path = Path(__file__).resolve().parents[1] / DEFAULT_MODEL
    if not path.is_file():
        pytest.fail(f"{DEFAULT_MODEL} is missing; run make model", pytrace=False)
    return path


@pytest.fixture
def fake_worker_command() -> Callable[..., list[str]]:
    """The command line of a fake worker, without its address: options in, words out."""

    def command(*options: object) -> list[str]:
        return [sys.executable, str(FAKE_WORKER), *map(str, options)]

    return command


@pytest.fixture
def fake_worker(
    fake_worker_command: Callable[..., list[str]], tmp_path: Path
) -> Iterator[Callable[..., str]]:
    """Starts fake workers that end with the test: options in, address out."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*options: object) -> str:
        address = f"unix:{tmp_path / f'worker-{len(running)}.sock'}"
        running.append(subprocess.Popen(fake_worker_command("--listen", address, *options)))
        return address

    yield start
    for process in running:
        process.kill()
        process.wait()
