"""What strategies cost as this worker launches them."""

from collections.abc import Collection, Mapping
from typing import Protocol

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import Kernel, Phase, PlacesResults, Strategy, Work

Strategies = Mapping[tuple[Phase, Kernel], Strategy]

# Of what the host takes to launch a layer anew, where launches are laid out once a step: an H200.
LAID_OUT = 0.35


class StrategyCosts(Protocol):
    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost: ...  # of one layer, each of whose launches is laid out anew


class LaunchCosts:
    def __init__(
        self,
        costs: StrategyCosts,
        strategies: Strategies,
        *,
        replayed: Collection[Phase],  # by a graph: the host's time is nothing
        laid_out: bool,  # strategies that can, lay their launches out once a step
    ) -> None:
        self._costs = costs
        self._replayed = frozenset(replayed)
        self._laid_out = {
            key for key, of in strategies.items() if laid_out and isinstance(of, PlacesResults)
        }

    def cost(self, strategy: Strategy, layout: AttentionLayout, work: Work) -> Cost:
        """Of one layer."""
        phase, kernel = strategy.phase, strategy.kernel
        cost = self._costs.strategy_cost(phase, kernel, layout, work)
        if not cost.device_seconds:  # on a CPU
            return cost
        if phase in self._replayed:
            return cost._replace(host_seconds=0.0)
        if (phase, kernel) in self._laid_out:
            return cost._replace(host_seconds=LAID_OUT * cost.host_seconds)
        return cost
