"""Real `stemserve serve` processes on free ports."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemserve.service.default_model import fetch_default

READY = re.compile(r"stemserve is ready: .*gRPC [^:]+:(\d+), health (\d+), metrics (\d+)")
FREE_PORTS = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
STEMSERVE = (sys.executable, "-c", "from stemserve.service.cli import main; main()")

Started = tuple["subprocess.Popen[str]", dict[str, int]]


@pytest.fixture(scope="session")
def stemserve_command() -> Callable[..., list[str]]:
    """The command line of the CLI in this environment: words in, words out."""

    def command(*words: object) -> list[str]:
        return [*STEMSERVE, *map(str, words)]

    return command


@pytest.fixture(scope="module")
def start_server(
    stemserve_command: Callable[..., list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Started]]:
    """Starts servers that end with the module: options in; the process and its ports out.

    Ports are named rpc, health and metrics.
    """
    running: list[subprocess.Popen[str]] = []

    def start(*options: object) -> Started:
        log = tmp_path_factory.mktemp("server") / "stderr"
        with log.open("w") as stderr:
            server = subprocess.Popen(
                stemserve_command("serve", *FREE_PORTS, *options),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        running.append(server)
        assert server.stdout is not None
        line = server.stdout.readline()
        found = READY.search(line)
        assert found, f"the server said {line!r} and then:\n{log.read_text()}"
        rpc, health, metrics = map(int, found.groups())
        return server, {"rpc": rpc, "health": health, "metrics": metrics}

    yield start
    for server in running:
        with server:
            server.terminate()
            try:
                server.wait(30)
            finally:
                server.kill()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, where `make demo` keeps it; fetched if it is not there."""
    folder = Path(__file__).parents[2] / ".cache" / "models"
    return fetch_default(folder, progress=lambda line: None)
