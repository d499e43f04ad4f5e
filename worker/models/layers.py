"""One decoder layer."""

from typing import Protocol

import torch
from torch import Tensor

from stemserve.kernels.fused.heads import Heads
from stemserve.worker.models.layer_ops import LayerOps, SplitHeads
from stemserve.worker.models.linear import AddingLinear, Linear
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import LayerWeights


class Attend(Protocol):
    """Attention of a step's rows over whatever each of them sees; stored rows are in the pages.

    Rows of q, k and v may be strided; heads and head_dim are contiguous.
    """

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [rows, query_heads, head_dim]
        k: Tensor,  # [rows, kv_heads, head_dim]
        v: Tensor,  # [rows, kv_heads, head_dim]
    ) -> Tensor: ...  # [rows, query_heads, head_dim]


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        next_norm: Tensor,  # [hidden] of the next layer's attention, or the final one
        ops: LayerOps,
    ) -> None:
        self._index = index
        self._ops = ops
        self._qkv = ops.linear(weights.qkv, weights.qkv_bias)
        self._output = ops.linear(weights.output, weights.output_bias)
        self._gate_up = ops.linear(weights.gate_up, weights.gate_up_bias)
        self._down = ops.linear(weights.down, weights.down_bias)
        self._mlp_norm = weights.mlp_norm
        self._next_norm = next_norm
        self._qk_norm = _qk_norm(config, weights)

    def heads(
        self,
        normed: Tensor,  # [rows, hidden]
        split: SplitHeads,
    ) -> Heads:
        """What this layer's attention reads."""
        return split(self._index, self._qkv(normed), self._qk_norm)

    def rest(
        self,
        mixed: Tensor,  # [rows, query_heads * head_dim], the result of attention
        residual: Tensor,  # [rows, hidden], changed in place
    ) -> Tensor:  # [rows, hidden], normed for the next layer
        normed = self._add_norm(self._output, mixed, residual, self._mlp_norm)
        gated = self._ops.gate(self._gate_up(normed))
        return self._add_norm(self._down, gated, residual, self._next_norm)

    def _add_norm(self, linear: Linear, x: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """The norm of the residual, to which the product is added."""
        if isinstance(linear, AddingLinear) and linear.adds(len(x)):
            linear.add_to(residual, x)
            return self._ops.norm(residual, norm)
        return self._ops.add_norm(linear(x), residual, norm)


def _qk_norm(config: ModelConfig, weights: LayerWeights) -> Tensor | None:
    """[query_heads + kv_heads, head_dim], so that one product serves both."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return torch.cat(
        (
            weights.q_norm.expand(config.query_heads, -1),
            weights.k_norm.expand(config.kv_heads, -1),
        )
    )
