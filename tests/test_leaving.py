"""A signal while a program still imports: its exit status says it, and no traceback."""

import signal
import subprocess
import sys

import pytest

# Sends itself the signal when that module is about to be imported, and runs a program.
PROGRAM = """
import os, runpy, signal, sys

at, number, module, how = sys.argv[1:]

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.write(2, b"sent")
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Sender())
sys.argv[1:] = ["--help"]
# Not as they were found: what runs in the background of a shell ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if how == "ignored":
    signal.signal(int(number), signal.SIG_IGN)
if module == "stemserve.service.cli":
    from stemserve.service.cli import main
    main()
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
PROGRAMS = [
    ("stemserve.service.cli", "typer"),
    ("stemserve.service.cli", "stemserve.service.commands.worker"),
    ("stemserve.worker", "torch"),
    ("stemserve.worker.alone", "stemserve.worker.servicer"),
]


def run(
    module: str, at: str, number: signal.Signals, how: str
) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-c", PROGRAM, at, str(int(number)), module, how]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("module", "at"), PROGRAMS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_imports_ends_a_program_without_a_word(
    module: str, at: str, number: signal.Signals
) -> None:
    done = run(module, at, number, "plain")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "sent")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_from_the_start_stays_ignored(number: signal.Signals) -> None:
    done = run(*PROGRAMS[0], number, "ignored")
    assert (done.returncode, done.stderr) == (0, "sent")
    assert "make-key" in done.stdout
