"""Runs of the command line in tests, and the one JSON object that a command prints."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Words = Callable[..., list[str]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
PATIENCE_S = 120.0


def parsed(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
