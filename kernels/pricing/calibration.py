"""Measure a cost table on the device at hand."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.calibration_blocks import Grid, four_digits, measure_blocks
from stemserve.kernels.pricing.calibration_layouts import PAGE_SIZE
from stemserve.kernels.pricing.calibration_strategies import (
    CPU_EXTENT,
    GPU_EXTENT,
    Extent,
    SteeredCosts,
    StrategyMeter,
    measure_strategies,
)
from stemserve.kernels.pricing.cost_correction import Corrections, StrategyCorrection
from stemserve.kernels.pricing.cost_model import CostTable, correction_key
from stemserve.kernels.pricing.engine_cost import BlockEngine, Cost
from stemserve.kernels.pricing.engine_fit import Measurement, default_engine, fit_engines
from stemserve.kernels.pricing.stopwatch import Bench, StrategyBench
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import TORCH, Phase, Work

CPU_GRID = Grid()
# Of a path that is only the last resort there.
GPU_GRID = Grid(rows=(1, 16, 128, 512), kv_tokens=(8, 256, 2048, 8192), passes=1)

Progress = Callable[[int, int], None]  # measurements done, measurements in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    grid: Grid
    extent: Extent


CPU_PLAN = Plan(grid=CPU_GRID, extent=CPU_EXTENT)
GPU_PLAN = Plan(grid=GPU_GRID, extent=GPU_EXTENT)
HOST_PERCENTILE = 25  # what disturbs the host only ever adds to its time
LEAST_SECONDS = 1e-7  # of a model that says nothing
MEMORY_SHARE = 4  # of the free memory of a GPU, one in so many
QUICK_SHARE = 5  # of the layouts and the time, one in so many


def plan_for(device: torch.device, *, quick: bool = False) -> Plan:
    if device.type == "cpu":
        plan = CPU_PLAN
    else:
        free, _ = torch.cuda.mem_get_info(device)
        plan = replace(GPU_PLAN, extent=GPU_PLAN.extent.within(free // MEMORY_SHARE))
    if not quick:
        return plan
    extent = plan.extent
    return Plan(
        grid=replace(plan.grid, passes=1),
        extent=replace(
            extent,
            score_layouts=extent.score_layouts // QUICK_SHARE,
            decode_layouts=extent.decode_layouts // QUICK_SHARE,
            budget_s=extent.budget_s / QUICK_SHARE,
        ),
    )


def measure_cost_table(
    shape: HeadShape,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    plan: Plan | None = None,
) -> CostTable:
    """About 40 s on one thread of a CPU for 9 query heads of 64; under two minutes on a GPU."""
    on_cpu = device.type == "cpu"
    plan = plan or plan_for(device)
    counter = _Counter(progress, plan.grid.points + plan.extent.layouts)
    bench = Bench(shape=shape, device=device, dtype=dtype)
    table = _table(bench, measure_blocks(bench, plan.grid, counter.step))
    processors = 0 if on_cpu else _processors(device)
    meter = _meter(bench, table, first_estimate(table, processors), plan.extent)
    measured = measure_strategies(meter, plan.extent, counter.step)
    counter.end()
    return fitted_table(table, measured, processors)


def _meter(
    bench: Bench, table: CostTable, estimate: Callable[[Work], float], extent: Extent
) -> StrategyMeter:
    costs = SteeredCosts(table)
    available = strategies(bench.shape, device=bench.device, dtype=bench.dtype, costs=costs)
    return StrategyMeter(
        rig=StrategyBench(bench, pages=extent.pages, page_size=PAGE_SIZE, rows=extent.rows),
        strategies=list(available.values()),
        costs=costs,
        estimate=estimate,
    )


def first_estimate(table: CostTable, processors: int) -> Callable[[Work], float]:
    """Seconds before any strategy is measured; no processors: of a CPU."""
    if not processors:
        return lambda work: table.work_cost(work).seconds
    engine = default_engine(table.query_heads, table.head_dim, processors)
    return lambda work: sum((engine.cost(part) for part in work.parts), Cost(0.0, 0.0)).seconds


def fitted_table(table: CostTable, measured: Sequence[Measurement], processors: int) -> CostTable:
    """The table with the engines and corrections that give what was measured."""
    if processors:
        heads = (table.query_heads, table.kv_heads, table.head_dim)
        table = replace(
            table, engines={**table.engines, **fit_engines(measured, heads, processors)}
        )
    phases = sorted({m.phase for m in measured})
    return replace(
        table, corrections={phase: _corrections(table, measured, phase) for phase in phases}
    )


def _corrections(table: CostTable, measured: Sequence[Measurement], phase: Phase) -> Corrections:
    mine = [m for m in measured if m.phase is phase]
    shapes = sorted({m.features for m in mine})
    number = {features: i for i, features in enumerate(shapes)}
    hosts: dict[str, list[float]] = {}
    ratios: dict[str, list[float | None]] = {}
    for m in mine:
        key = correction_key(m.kernel, m.work)
        hosts.setdefault(key, []).append(m.cost.host_seconds)
        modelled = table.work_cost(m.work)
        seconds = modelled.host_seconds if table.is_serial else modelled.device_seconds
        ratio = m.cost.device_seconds / max(seconds, LEAST_SECONDS)
        found = ratios.setdefault(key, [None] * len(shapes))
        found[number[m.features]] = round(math.log(ratio), 4)
    return Corrections(
        shapes=tuple(shapes),
        strategies={
            key: StrategyCorrection(
                host_seconds=four_digits(float(np.percentile(hosts[key], HOST_PERCENTILE))),
                device=tuple(device),
            )
            for key, device in sorted(ratios.items())
        },
    )


def _table(bench: Bench, blocks: BlockEngine) -> CostTable:
    return CostTable(
        device=device_name(bench.device),
        dtype=str(bench.dtype).removeprefix("torch."),
        query_heads=bench.shape.query_heads,
        kv_heads=bench.shape.kv_heads,
        head_dim=bench.shape.head_dim,
        libraries=libraries(bench.device),
        threads=torch.get_num_threads() if bench.device.type == "cpu" else 1,
        engines={TORCH: blocks},
        corrections={},
    )


def libraries(device: torch.device) -> dict[str, str]:
    """What the measured kernels come from, where it is installed."""
    names = ["torch"] if device.type == "cpu" else ["torch", "triton", "flashinfer-python"]
    found: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class _Counter:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def step(self) -> None:
        self._progress(self._done, self._total)
        self._done += 1

    def end(self) -> None:
        self._progress(self._total, self._total)


def device_name(device: torch.device) -> str:
    """As the shipped tables are named: cpu, nvidia-h200."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def _processors(device: torch.device) -> int:
    cuda: Any = torch.cuda  # partly untyped
    count: int = cuda.get_device_properties(device).multi_processor_count
    return count
