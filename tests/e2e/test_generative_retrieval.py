"""The example of generative retrieval, beside a server of the default model."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "generative_retrieval.py"
StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]


def test_the_example_finds_capitals_and_nothing_else(
    start_server: StartServer, default_model_path: Path
) -> None:
    _, ports = start_server("--model", default_model_path)
    address = f"127.0.0.1:{ports['rpc']}"
    words = [sys.executable, str(EXAMPLE), "--server", address, "--many", "2000"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300.0)
    assert ran.returncode == 0, ran.stderr
    assert "6 of 6 are right" in ran.stdout
    assert "2,000 ids of 8 tokens" in ran.stdout and "all answers among them" in ran.stdout
