"""The first signal asks, the second ends, whatever the loop does meanwhile."""

import signal
import subprocess
import sys

import pytest

# Waits for the first signal, and then as it is told to.
PROGRAM = """
import asyncio, sys, threading
import uvloop
from stemserve.service.serving.stop_signals import StopSignals

async def main(how):
    async with StopSignals.watched(lambda: print("released", flush=True)) as signals:
        print("watched", flush=True)
        await signals.wait()
        print("asked", flush=True)
        if how == "thread":
            # In slices: Python may miss a signal that comes just as a wait without an end begins.
            while not threading.Event().wait(0.05):
                pass
        if how == "loop":
            await asyncio.Event().wait()

run = uvloop.run if sys.argv[1] == "uvloop" else asyncio.run
run(main(sys.argv[2]))
print("done", flush=True)
"""


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, text=True
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("waits_for", ["loop", "thread"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_waits(
    loop: str, waits_for: str, second: signal.Signals
) -> None:
    with start(loop, waits_for) as process:
        assert line(process) == "watched"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "asked"
        process.send_signal(second)
        try:
            assert process.wait(60) == 128 + second
        finally:
            process.kill()
        assert line(process) == "released"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_one_signal_ends_nothing_by_itself(loop: str) -> None:
    with start(loop, "nothing") as process:
        assert line(process) == "watched"
        process.send_signal(signal.SIGINT)
        assert [line(process), line(process)] == ["asked", "done"]
        assert process.wait(60) == 0
