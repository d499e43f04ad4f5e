"""Start `stemserve serve` for a benchmark, on free ports, and stop it."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

STEMSERVE = (sys.executable, "-c", "from stemserve.service.cli import main; main()")
START_S = 600.0
STOP_S = 30.0
TICKS = os.sysconf("SC_CLK_TCK")  # a second


class ServerFailed(Exception):
    """The server did not come up; the message says what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    address: str  # of its gRPC port
    metrics_url: str
    pid: int

    @property
    def worker_pids(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]

    @property
    def resident_bytes(self) -> int:
        """Of the server and its workers."""
        return sum(_resident_bytes(pid) for pid in (self.pid, *self.worker_pids))

    @property
    def cpu_seconds(self) -> float:
        """That the server and its workers have taken so far."""
        ticks = 0
        for pid in (self.pid, *self.worker_pids):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        with urlopen(self.metrics_url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if re.match(rf"stemserve_{name}(\{{| )", line)
        )


@contextmanager
def serving(options: Sequence[str], *, log: Path) -> Generator[str]:
    """The address of a server that is ready; its standard error goes to `log`."""
    with running_server(options, log=log) as server:
        yield server.address


@contextmanager
def running_server(
    options: Sequence[str],
    *,
    log: Path,
    settings: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> Generator[RunningServer]:
    """A server that is ready, and stopped afterwards; `settings` go into its environment."""
    ports = ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*STEMSERVE, "serve", *ports, *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment() | dict(settings or {}),
        )
        try:
            yield _ready(process, log, start_s)
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _ready(process: subprocess.Popen[str], log: Path, start_s: float) -> RunningServer:
    if process.stdout is None:
        raise ValueError("the server's standard output is not a pipe")
    if not select.select([process.stdout], [], [], start_s)[0]:
        raise ServerFailed(f"the server did not start in {start_s:g} s: {_end_of(log)}")
    line = process.stdout.readline()
    found = re.search(r"gRPC (\S+):(\d+), health \d+, metrics (\d+)", line)
    if found is None:
        raise ServerFailed(f"the server did not start: {line.strip() or _end_of(log)}")
    host, port, metrics_port = found.groups()
    return RunningServer(
        address=f"{host}:{port}",
        metrics_url=f"http://{host}:{metrics_port}/metrics",
        pid=process.pid,
    )


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:].strip()


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def environment() -> dict[str, str]:
    """Ours; the working folder may not get onto the import path."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if path := [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if entry]:
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return environment
