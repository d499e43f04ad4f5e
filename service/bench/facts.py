"""What the numbers of a run depend on, and the folder of its machine."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import stemserve

PACKAGES = ("torch", "triton", "flashinfer-python", "numpy", "grpcio", "protobuf", "uvloop")
RESULTS = Path("benchmarks") / "results"


def facts(*, seed: int, command: str) -> dict[str, Any]:
    gpu = gpu_name()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "stemserve": stemserve.__version__,
        "command": command,
        "seed": seed,
        "gpu": gpu,
        "driver": _nvidia_smi("driver_version") if gpu else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def results_file() -> Path:
    """In the working folder: benchmarks/results/h200/engine.json on an NVIDIA H200."""
    name = (gpu_name() or "cpu").removeprefix("NVIDIA ")
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") / "engine.json"


def gpu_name() -> str | None:
    """Of the first GPU of this machine; None without one."""
    return _nvidia_smi("name")


def _nvidia_smi(field: str) -> str | None:
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
