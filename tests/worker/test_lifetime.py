"""What ends a worker: the first signal asks, the second does not wait."""

import signal
import subprocess
import sys

import pytest

# Ends as a worker whose step hangs, or as one without.
PROGRAM = """
import sys, threading
from stemserve.worker.lifetime import Lifetime

with Lifetime.watched(None) as lifetime:
    print("watched", flush=True)
    code = lifetime.wait()
    print("ending", flush=True)
    if sys.argv[1] == "hangs":
        hanging = threading.Thread(target=threading.Event().wait, daemon=True)
        hanging.start()
        hanging.join()
sys.exit(code)
"""


def start(how: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", PROGRAM, how]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_worker_whose_step_hangs(second: signal.Signals) -> None:
    with start("hangs") as process:
        assert line(process) == "watched"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "ending"
        process.send_signal(second)
        try:
            assert process.wait(60) == 128 + second
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_a_worker_in_order(number: signal.Signals) -> None:
    with start("ends") as process:
        assert line(process) == "watched"
        process.send_signal(number)
        assert line(process) == "ending"
        assert process.wait(60) == 0
