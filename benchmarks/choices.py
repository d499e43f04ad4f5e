"""What the worker's dispatch would choose, and predicts, for a layout on this device."""

import logging
from dataclasses import dataclass, field

import torch

from stemserve.kernels.cost_model import CostTable
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.worker.costs import device_costs
from stemserve.worker.dispatch import Dispatcher, Prediction
from stemserve.worker.layout import AttentionGroup

log = logging.getLogger(__name__)

FAR = 10.0  # times the best prediction: listed, not timed


@dataclass(kw_only=True)
class Choices:
    """Strategies and costs as a worker has them, for any heads."""

    device: torch.device
    dtype: torch.dtype
    _costs: dict[HeadShape, CostTable] = field(default_factory=dict)
    _strategies: dict[HeadShape, dict[tuple[Phase, Kernel], Strategy]] = field(default_factory=dict)

    def costs(self, shape: HeadShape) -> CostTable:
        if shape not in self._costs:
            self._costs[shape] = device_costs(None, shape, self.dtype, self.device, _silent)
        return self._costs[shape]

    def strategies(self, shape: HeadShape) -> dict[tuple[Phase, Kernel], Strategy]:
        if shape not in self._strategies:
            self._strategies[shape] = strategies(
                shape, device=self.device, dtype=self.dtype, costs=self.costs(shape)
            )
        return self._strategies[shape]

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
