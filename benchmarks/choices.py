"""What the worker's dispatch would choose, and predicts, for a layout on this device."""

import sys
from dataclasses import dataclass, field

import torch

from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.pricing.calibration import device_name, measure_cost_table
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.cost_table_file import of_dtype, shipped_cost_tables, table_for_heads
from stemserve.kernels.registry import StrategySet, strategy_set
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.worker.choice.dispatch import Dispatcher, Prediction
from stemserve.worker.steps.layout import AttentionGroup

FAR = 10.0  # times the best prediction: listed, not timed


@dataclass(kw_only=True)
class Choices:
    """Strategies and costs as a worker has them, for any heads."""

    device: torch.device
    dtype: torch.dtype
    _tables: tuple[CostTable, ...] = ()
    _costs: dict[HeadShape, CostTable] = field(default_factory=dict)
    _sets: dict[HeadShape, StrategySet] = field(default_factory=dict)

    def costs(self, shape: HeadShape) -> CostTable:
        """Of the table that a worker would take; measured once where none comes for the device."""
        if not self._tables:
            name, dtype = device_name(self.device), str(self.dtype).removeprefix("torch.")
            self._tables = tuple(of_dtype(shipped_cost_tables(name), dtype))
        if not self._tables:
            print("no cost table comes for this device: measuring one", file=sys.stderr)
            self._tables = (measure_cost_table(shape, self.device, self.dtype, _silent),)
        if shape not in self._costs:
            self._costs[shape] = table_for_heads(self._tables, shape)
        return self._costs[shape]

    def strategies(self, shape: HeadShape) -> dict[tuple[Phase, Kernel], Strategy]:
        return self._set(shape).strategies

    @property
    def lacking(self) -> str | None:
        """Why torch's paths stood in for faster ones, if they did."""
        return next((found.lacking for found in self._sets.values() if found.lacking), None)

    def _set(self, shape: HeadShape) -> StrategySet:
        if shape not in self._sets:
            self._sets[shape] = strategy_set(
                shape, device=self.device, dtype=self.dtype, costs=self.costs(shape)
            )
        return self._sets[shape]

    def predictions(
        self, phase: Phase, layout: AttentionLayout, shape: HeadShape
    ) -> list[Prediction]:
        """Cheapest first: dispatch takes the first. Refusals last."""
        dispatcher = Dispatcher(self.strategies(shape), self.costs(shape), forced=None)
        group = AttentionGroup(phase=phase, layout=layout, rows=slice(0, layout.num_rows))
        return dispatcher.predict(group)


def worth_timing(predictions: list[Prediction]) -> list[Prediction]:
    """Those that are not predicted far beyond the best."""
    able = [found for found in predictions if found.refusal is None]
    return [found for found in able if found.seconds <= FAR * able[0].seconds]


def _silent(done: int, total: int) -> None:
    pass
