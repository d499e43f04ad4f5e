"""What the results of a GPU run depend on, and the folder that they belong to."""

import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from report import commit

from stemserve.kernels.pricing.calibration import device_name

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "numpy", "flashinfer-python")


def results_folder(device: torch.device) -> Path:
    """As the cost tables name the device, without the maker: h200 of nvidia-h200."""
    return RESULTS / device_name(device).removeprefix("nvidia-")


def facts(seed: int) -> dict[str, Any]:
    cuda: Any = torch.cuda
    properties = cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/bench_kernels.py", *map(_name, sys.argv[1:])]),
        "seed": seed,
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "dtype": "float16",
        "page_tokens": 16,
    }


def _name(argument: str) -> str:
    """Of a path, its last part: where things lie on a machine is no fact of the results."""
    return Path(argument).name if argument.startswith(("/", "~", ".")) else argument


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
