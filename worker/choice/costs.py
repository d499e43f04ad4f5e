"""The cost table of the device: given, shipped with the kernels, or measured at the start."""

import logging
import time
from pathlib import Path

import torch

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.calibration import device_name, libraries, measure_cost_table
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.cost_table_file import (
    load_cost_tables,
    of_dtype,
    shipped_cost_tables,
    table_for_heads,
)
from stemserve.kernels.pricing.engine_cost import CostTableError
from stemserve.worker.config import ConfigError
from stemserve.worker.models.weights import Progress

log = logging.getLogger(__name__)


def device_costs(
    path: Path | None,
    heads: HeadShape,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> CostTable:
    """Raises ConfigError if the given table cannot be read."""
    if path is not None:
        table = table_for_heads(given_tables(path), heads)
        log.info("costs: %s, measured on %s", path, table.device)
        _compare_libraries(table, device)
        return table
    name = device_name(device)
    shipped = of_dtype(shipped_cost_tables(name), _type_name(dtype))
    if shipped:
        log.info("costs: the table that comes with the kernels for %s", name)
        table = table_for_heads(shipped, heads)
        _compare_libraries(table, device)
        return table
    log.info("costs: no table for %s with %s; measuring", name, _type_name(dtype))
    started = time.perf_counter()
    table = measure_cost_table(heads, device, dtype, progress)
    log.info(
        "costs: measured in %.1f s; --cost-table saves the time", time.perf_counter() - started
    )
    return table


def _compare_libraries(table: CostTable, device: torch.device) -> None:
    here = libraries(device)
    others = [
        f"{name} {measured} (here {here.get(name, 'none')})"
        for name, measured in table.libraries.items()
        if _release(here.get(name, "none")) != _release(measured)
    ]
    if others:
        log.info("costs: measured with %s; stemserve calibrate measures anew", ", ".join(others))


def _release(version: str) -> str:
    """Without the build: 2.11.0+cu130 is 2.11.0."""
    return version.partition("+")[0]


def given_tables(path: Path) -> tuple[CostTable, ...]:
    try:
        return load_cost_tables(path)
    except (OSError, UnicodeDecodeError, CostTableError) as error:
        raise ConfigError(f"--cost-table {path}: {error}") from error


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
