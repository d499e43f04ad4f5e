"""Start `stemserve serve` for a benchmark, on free ports, and stop it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STEMSERVE = Path(sys.executable).with_name("stemserve")
STOP_S = 30.0


class ServerFailed(Exception):
    """The server did not come up; the message says what it said."""


@contextmanager
def serving(options: Sequence[str], *, log: Path) -> Iterator[str]:
    """The address of a server that is ready; its standard error goes to `log`."""
    ports = ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(STEMSERVE), "serve", *ports, *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
        )
        try:
            yield _address(process, log)
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    if process.stdout is None:
        raise ValueError("the server's standard output is not a pipe")
    line = process.stdout.readline()
    found = re.search(r"gRPC (\S+:\d+)", line)
    if found is None:
        raise ServerFailed(f"the server did not start: {line.strip() or log.read_text()[-2000:]}")
    return found.group(1)


def environment() -> dict[str, str]:
    """Ours, without this folder on the import path; nor may the working folder get onto it."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "PYTHONSAFEPATH": "1"}
