"""Write a benchmark's results with the facts that they depend on, and no name of any machine."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("stemserve", "torch", "transformers", "numpy", "grpcio", "protobuf")


def write(path: Path, *, command: str, threads: int, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"command": command, "threads": threads, "dtype": "float32", **_machine()}
    path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    """Name, family and model: a virtual machine often hides the product's name."""
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", info, re.MULTILINE))
    return f"{fields['model name']}, family {fields['cpu family']}, model {fields['model']}"


def commit() -> str:
    """Of this checkout; unknown without git, or where this file is a copy inside another one."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(tracked, capture_output=True, check=True)
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    # Results are written while they are made: they are no change of the code.
    diff = [*git, "status", "--porcelain", "--untracked-files=no", "--", "..", ":!results"]
    changes = subprocess.run(diff, capture_output=True, text=True)
    return head.stdout.strip() + (" with changes" if changes.stdout.strip() else "")
