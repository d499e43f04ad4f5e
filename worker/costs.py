"""The cost table of the device: given, shipped with the kernels, or probed at the start."""

import logging
import re
from pathlib import Path

import torch

from stemserve.kernels.cost_model import (
    CostTable,
    CostTableError,
    load_cost_table,
    shipped_cost_table,
)
from stemserve.kernels.layout import HeadShape
from stemserve.worker.config import ConfigError

log = logging.getLogger(__name__)


def device_costs(
    path: Path | None, heads: HeadShape, dtype: torch.dtype, device: torch.device
) -> CostTable:
    if path is not None:
        return _given(path).scaled(heads)
    table = shipped_cost_table(device_name(device))
    return table.scaled(heads)


def device_name(device: torch.device) -> str:
    """As the shipped tables are named: cpu, nvidia-h200."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def _given(path: Path) -> CostTable:
    try:
        return load_cost_table(path)
    except (OSError, UnicodeDecodeError, CostTableError) as error:
        raise ConfigError(f"--cost-table {path}: {error}") from error
