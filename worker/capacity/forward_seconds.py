"""Predicted seconds of a step on a GPU: attention by its cost table, the rest by rates."""

from dataclasses import dataclass, fields
from functools import cached_property

import torch

from stemserve.kernels.codec.division import PieceCosts
from stemserve.kernels.codec.host_tables import host_work
from stemserve.kernels.codec.launch_shape import padded_dim, shape_of
from stemserve.kernels.codec.pieces import DEFAULT_DIVISION
from stemserve.kernels.codec.planner import Planner
from stemserve.kernels.dense.plan import ENGINE as DENSE
from stemserve.kernels.dense.plan import DenseHost
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.engine_cost import Cost, TileEngine
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.worker.capacity.device_rates import DeviceRates
from stemserve.worker.config import ConfigError
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import LayerWeights, ModelWeights, allocate

TREE = "tree"
PRODUCTS = 4  # of a layer: qkv, output, gate and up, down


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a step, by what the GPU does; `waiting`: for launches of the host."""

    attention: float = 0.0
    products: float = 0.0
    pointwise: float = 0.0
    head: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.products + self.pointwise + self.head + self.waiting

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            attention=self.attention + other.attention,
            products=self.products + other.products,
            pointwise=self.pointwise + other.pointwise,
            head=self.head + other.head,
            waiting=self.waiting + other.waiting,
        )


@dataclass(frozen=True, kw_only=True)
class ForwardSeconds:
    """A model of half type on one GPU. `costs` are those of its heads."""

    model: ModelConfig
    dtype: torch.dtype
    rates: DeviceRates
    costs: CostTable

    def __post_init__(self) -> None:
        """Raises ConfigError: only attention of a GPU can be planned without it."""
        for name in (DENSE, TREE):
            if not isinstance(self.costs.engines.get(name), TileEngine):
                raise ConfigError(
                    f"the cost table of {self.costs.device} prices no engine {name!r}: give one "
                    "that stemserve calibrate measured on a GPU in a half type"
                )

    def prefill(self, layout: AttentionLayout, read_rows: int) -> Seconds:
        """A step of prompts and items, whose attention the host launches layer by layer."""
        attention = self._prefill_attention(layout)
        layer = self._layer(attention.device_seconds, layout.num_rows)
        waiting = max(0.0, self.rates.layer_host_s - layer.total)
        total = self._all_layers(layer)
        return total + Seconds(
            waiting=waiting * self.model.num_layers, head=self.head_seconds(read_rows)
        )

    def decode(self, layout: AttentionLayout) -> Seconds:
        """A step of one row a sample, replayed as a CUDA graph."""
        work = host_work(self._planner.plan(layout))
        cost = self.costs.strategy_cost(Phase.DECODE, Kernel.CODEC, layout, work)
        rows = layout.num_rows
        total = self._all_layers(self._layer(cost.device_seconds, rows))
        total += Seconds(head=self.head_seconds(rows))
        return total + Seconds(waiting=total.total * self.rates.burst_gap)

    def head_seconds(self, rows: int) -> float:
        """Of logits, or class scores, of so many rows."""
        model = self.model
        width = model.vocab_size if model.has_lm_head else len(model.class_labels)
        return self._product(rows, model.hidden_size * width) if rows else 0.0

    @cached_property
    def weight_bytes(self) -> int:
        weights = allocate(self.model, self.dtype, torch.device("meta"))
        layers = [v for layer in weights.layers for v in _tensors(layer)]
        unique = {id(tensor): tensor for tensor in (*_tensors(weights), *layers)}
        return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())

    def kv_token_bytes(self, itemsize: int | None = None) -> int:
        """Of one token in all layers."""
        values = 2 * self.model.kv_size * self.model.num_layers
        return values * (itemsize or self.dtype.itemsize)

    def _prefill_attention(self, layout: AttentionLayout) -> Cost:
        """The cheaper of the strategies that the dense kernel has."""
        slots = self._engine(DENSE).slots
        found: list[Cost] = []
        for kernel in (Kernel.CASCADE, Kernel.SPLIT):
            host = DenseHost(kernel=kernel, query_heads=self.model.query_heads, ctas=slots)
            work = host.plan(layout).work
            found.append(self.costs.strategy_cost(Phase.PREFILL, kernel, layout, work))
        return min(found, key=lambda cost: cost.seconds)

    @cached_property
    def _planner(self) -> Planner:
        heads, engine = self.model.heads, self._engine(TREE)
        resident = shape_of(padded_dim(heads.head_dim) * self.dtype.itemsize).resident
        return Planner(
            group=heads.group,
            bins=max(1, engine.slots * resident // heads.kv_heads),
            window=0,
            costs=PieceCosts.of_engine(engine),
            division=DEFAULT_DIVISION,
        )

    def _engine(self, name: str) -> TileEngine:
        engine = self.costs.engines[name]
        assert isinstance(engine, TileEngine)
        return engine

    def _layer(self, attention: float, rows: int) -> Seconds:
        model, rates = self.model, self.rates
        hidden, inner, qkv = model.hidden_size, model.intermediate_size, self._qkv
        sizes = (hidden * qkv, model.query_size * hidden, 2 * hidden * inner, inner * hidden)
        # Each is written once and read once; norms, RoPE and gates write anew.
        values = rows * (6 * hidden + 3 * qkv + 3 * inner)
        moved = values * self.dtype.itemsize / rates.memory_bytes
        return Seconds(
            attention=attention,
            products=sum(self._product(rows, size) for size in sizes),
            pointwise=max(moved, rates.pointwise_s),
        )

    @property
    def _qkv(self) -> int:
        return self.model.query_size + 2 * self.model.kv_size

    def _product(self, rows: int, weights: int) -> float:
        rates = self.rates
        arithmetic = 2 * rows * weights / rates.product_flops
        reading = weights * self.dtype.itemsize / rates.weight_bytes
        return max(arithmetic, rates.product_s + reading)

    def _all_layers(self, layer: Seconds) -> Seconds:
        count = self.model.num_layers
        return Seconds(
            attention=layer.attention * count,
            products=layer.products * count,
            pointwise=layer.pointwise * count,
        )


def _tensors(holder: ModelWeights | LayerWeights) -> list[torch.Tensor]:
    values = (getattr(holder, name) for name in [f.name for f in fields(holder)])
    return [value for value in values if isinstance(value, torch.Tensor)]
