"""A short soak of a real server."""

import json
import subprocess
import sys
from pathlib import Path

from stemserve.service.bench.server_process import environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_mixed_calls_on_a_small_cache_leave_nothing_behind() -> None:
    words = ["--requests", "60", "--callers", "6", "--serve-options", "--threads 1"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "soak.py"), *words],
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": str(BENCHMARKS)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["requests"] == 60 and not result["refused"]
