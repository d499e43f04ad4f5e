"""Real `stemserve serve` processes on free ports, and engines inside the test."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.e2e.cli_runs import PATIENCE_S, Run, StartServer, Words
from tests.e2e.engine_rig import EngineRig
from tests.e2e.random_models import MakeRig, RandomModel, RandomModels
from tests.service.serving import byte_tokenizer
from typer.testing import CliRunner

from stemserve.service.commands.app import app

READY = re.compile(
    r"stemserve is ready: .*gRPC [^:]+:(\d+), health (\d+), metrics (\d+)(?:, admin (\d+))?"
)
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

    Ports are named rpc, health, metrics, and admin where there is one.
    """
    running: dict[Path, subprocess.Popen[str]] = {}

    def start(*options: object) -> Started:
        log = tmp_path_factory.mktemp("server") / "stderr"
        with log.open("w") as stderr:
            server = subprocess.Popen(
                stemserve_command("serve", *FREE_PORTS, *options),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
            )
        running[log] = server
        assert server.stdout is not None
        line = server.stdout.readline()
        found = READY.search(line)
        assert found, f"the server said {line!r} and then:\n{log.read_text()}"
        names = ("rpc", "health", "metrics", "admin")
        ports = zip(names, found.groups(), strict=True)
        return server, {name: int(port) for name, port in ports if port}

    yield start
    stuck = [log for log, server in running.items() if not has_ended(server)]
    assert not stuck, "\n".join(log.read_text() for log in stuck)


def has_ended(server: "subprocess.Popen[str]") -> bool:
    """Whether SIGTERM ends it; if not, what its threads do is in its log (faulthandler)."""
    with server:
        server.terminate()
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGABRT)
            return False
    return True


@pytest.fixture(scope="module")
def dummy_options(tiny_model: Path) -> list[object]:
    return ["--model", tiny_model, "--load-format", "dummy", "--kv-pages", 500, "--threads", 1]


@pytest.fixture(scope="module")
def address(start_server: StartServer, dummy_options: list[object]) -> str:
    _, ports = start_server(*dummy_options)
    return f"127.0.0.1:{ports['rpc']}"


@pytest.fixture
def run() -> Run:
    """A command in this process."""

    def run(*words: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        arguments = [str(word) for word in words]
        done = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_process(stemserve_command: Words) -> Run:
    """A command as a process of its own."""

    def run(*words: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            stemserve_command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return run


@pytest.fixture
def seed() -> int:
    """Fresh every run; a failing test shows it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    """Random models of all families, each made when a test first asks for it."""
    return RandomModels(tmp_path_factory)


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Engines with an empty cache. With the test's end all pages must be free or cached."""
    rigs: list[EngineRig] = []

    def make(
        model: RandomModel, *, max_step_tokens: int = 512, eos_ids: frozenset[int] = frozenset()
    ) -> EngineRig:
        tokenizer = replace(byte_tokenizer(), eos_ids=eos_ids)
        rigs.append(EngineRig(model.worker, tokenizer, max_step_tokens=max_step_tokens))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
