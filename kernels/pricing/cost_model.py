"""Predicted seconds of attention strategies, from a table measured on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from stemserve.kernels.layout import AttentionLayout, HeadShape, Int32
from stemserve.kernels.pricing.cost_correction import Corrections, layout_features
from stemserve.kernels.pricing.engine_cost import (
    BlockEngine,
    Cost,
    CostTableError,
    Engine,
    Float64,
    scale_ratio,
)
from stemserve.kernels.strategy import TORCH, Kernel, Phase, Work


class Costs(Protocol):
    """What strategies choose and divide by."""

    @property
    def launch_seconds(self) -> float: ...  # of a call of the torch path

    def block_seconds(self, rows: Int32 | int, kv_tokens: Int32 | int) -> Float64: ...  # C_est

    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost: ...  # of one layer


SERIAL_DEVICE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What engines cost, part by part, and how far whole strategies are from the sum of it.

    A table for other heads is `scaled`, in proportion to query heads * head_dim. It is an estimate;
    calibrate to have the heads measured.
    """

    device: str
    dtype: str
    query_heads: int
    kv_heads: int
    head_dim: int
    libraries: Mapping[str, str]  # name -> version of what was measured
    threads: int = 1  # of a CPU
    engines: Mapping[str, Engine]
    corrections: Mapping[Phase, Corrections]

    def __post_init__(self) -> None:
        if self.query_heads < 1 or self.kv_heads < 1 or self.head_dim < 1:
            raise CostTableError("heads and head_dim of a cost table must be at least 1")
        if self.query_heads % self.kv_heads:
            raise CostTableError("query heads of a cost table must be a multiple of its KV heads")
        if not isinstance(self.engines.get(TORCH), BlockEngine):
            raise CostTableError(f"a cost table must have the engine {TORCH} as blocks")

    @property
    def is_serial(self) -> bool:
        """The host computes what it launches."""
        return self.device == SERIAL_DEVICE

    @property
    def torch_engine(self) -> BlockEngine:
        engine = self.engines[TORCH]
        assert isinstance(engine, BlockEngine)
        return engine

    @property
    def launch_seconds(self) -> float:
        """Of a call of the torch path."""
        return self.torch_engine.launch_seconds

    def block_seconds(self, rows: Int32 | int, kv_tokens: Int32 | int) -> Float64:
        """C_est of the torch path in seconds, elementwise."""
        return self.torch_engine.block_seconds(rows, kv_tokens)

    def work_cost(self, work: Work) -> Cost:
        """The sum of the parts; a part of an engine that was not measured counts as torch's."""
        total = Cost(0.0, 0.0)
        for part in work.parts:
            total += self.engines.get(part.engine, self.torch_engine).cost(part)
        return self._serial(total)

    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost:
        """Of one layer of the strategy's work on the layout."""
        cost = self.work_cost(work)
        corrections = self.corrections.get(phase)
        if corrections is None:
            return cost
        if self.is_serial:
            cost = Cost(0.0, cost.host_seconds)
        key = correction_key(kernel, work)
        return self._serial(corrections.corrected(key, layout_features(layout), cost))

    def _serial(self, cost: Cost) -> Cost:
        """On a CPU all of it is the host's."""
        if not self.is_serial:
            return cost
        return Cost(cost.host_seconds + cost.device_seconds, 0.0)

    def scaled(self, shape: HeadShape) -> "CostTable":
        """The table for other heads."""
        ratio = scale_ratio(shape, self.query_heads, self.head_dim)
        return replace(
            self,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            engines={name: engine.scaled(ratio) for name, engine in self.engines.items()},
        )


def correction_key(kernel: Kernel, work: Work) -> str:
    """A strategy that uses other engines for other layouts is corrected for each set of them."""
    engines = "+".join(sorted({part.engine for part in work.parts}))
    return f"{kernel}:{engines}"
