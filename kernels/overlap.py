"""Launches that start while the kernel before them ends (programmatic dependent launch)."""

from functools import cache
from typing import Any

import torch

CAPABILITY = (9, 0)  # at least


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of a Triton launch whose kernel waits for the one before where OVERLAP is set."""
    cuda: Any = torch.cuda  # partly untyped
    if device.type != "cuda" or cuda.get_device_capability(device) < CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
