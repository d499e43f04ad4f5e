"""Kernels compile for an H200 on hosts without one, and no step of another size compiles anew."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "hopper_compiles.py"


def compiled(what: str, cache: Path) -> dict[str, int]:
    """Programs by kernel."""
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, what],
        env=others | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_one_program_serves_steps_of_any_size(tmp_path: Path) -> None:
    assert compiled("variants", tmp_path) == {
        "gather_tokens": 1,
        "merge_rows": 1,
        "merge_levels": 1,
        "block_kernel": 1,
        "row_kernel": 1,
        "scan_kernel": 1,
        "settle_kernel": 1,
        "weigh_kernel": 1,
        "advance_kernel": 1,
        "record_kernel": 1,
    }


def test_what_a_worker_compiles_when_it_starts_compiles_for_an_h200(tmp_path: Path) -> None:
    found = compiled("start", tmp_path)
    assert found["merge_kernel"] == 9
    assert found.keys() >= {
        "tree_kernel",
        "dense_kernel",
        "row_kernel",
        "gather_tokens",
        "record_kernel",
    }
