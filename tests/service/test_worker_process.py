"""The worker as a child process: started, stopped, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stemserve.service.workers import worker_process
from stemserve.service.workers.worker_client import WorkerClient
from stemserve.service.workers.worker_process import WorkerProcess

Command = Callable[..., list[str]]

PARENT = """
import sys, time
from stemserve.service.workers.worker_process import WorkerProcess
worker = WorkerProcess(sys.argv[1:])
print(worker.pid, flush=True)
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def has_content(file: Path) -> bool:
    return file.read_bytes() != b""


def test_a_started_worker_answers_on_its_address(fake_worker_command: Command) -> None:
    with WorkerProcess(fake_worker_command()) as worker:
        client = WorkerClient(worker.address)
        facts = client.describe(timeout_s=60.0, give_up=worker.ended)
        client.close()
        assert facts.model == "fake"
        assert worker.ended() is None


def test_the_worker_allocates_as_it_is_told(
    fake_worker_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wanted in (None, "4096"):
        if wanted is not None:
            monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", wanted)
        with WorkerProcess(fake_worker_command()) as worker:
            environ = Path(f"/proc/{worker.pid}/environ")
            assert wait_until(partial(has_content, environ))
            variables = environ.read_bytes().split(b"\0")
        settings = dict(worker_process.ALLOCATION)
        if wanted is not None:
            settings["MALLOC_MMAP_THRESHOLD_"] = wanted
        for name, value in settings.items():
            assert f"{name}={value}".encode() in variables


def test_stop_ends_the_process_and_removes_its_socket(fake_worker_command: Command) -> None:
    worker = WorkerProcess(fake_worker_command())
    folder = Path(worker.address.removeprefix("unix:")).parent
    worker.stop(grace_s=5.0)
    worker.stop(grace_s=5.0)
    assert not runs(worker.pid)
    assert not folder.exists()


def test_ended_says_how(fake_worker_command: Command) -> None:
    with WorkerProcess(fake_worker_command("--exit-code", 3)) as failed:
        assert wait_until(lambda: failed.ended() is not None)
        assert failed.ended() == "the worker process ended with exit code 3"
    with WorkerProcess(fake_worker_command()) as killed:
        os.kill(killed.pid, signal.SIGKILL)
        assert wait_until(lambda: killed.ended() is not None)
        assert killed.ended() == "the worker process ended by SIGKILL"


def test_the_worker_ends_when_its_parent_is_killed(fake_worker_command: Command) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *fake_worker_command()], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
    assert wait_until(lambda: not runs(pid))
