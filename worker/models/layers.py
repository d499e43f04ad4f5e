"""One decoder layer."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stemserve.worker.models.linear import fastest_linear
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import LayerWeights
from stemserve.worker.models.rope import Rotation, rotate


class Attend(Protocol):
    """Attention of a step's rows over whatever each of them sees, KV writes included.

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
    def __init__(self, config: ModelConfig, index: int, weights: LayerWeights) -> None:
        self._index = index
        self._config = config
        self._qkv = fastest_linear(weights.qkv, weights.qkv_bias)
        self._output = fastest_linear(weights.output, weights.output_bias)
        self._gate_up = fastest_linear(weights.gate_up, weights.gate_up_bias)
        self._down = fastest_linear(weights.down, weights.down_bias)
        self._attention_norm = weights.attention_norm
        self._mlp_norm = weights.mlp_norm
        self._qk_norm = _qk_norm(config, weights)

    def forward(
        self,
        residual: Tensor,  # [rows, hidden], changed in place
        rotation: Rotation,
        attend: Attend,
        keep_rows: Tensor | None,  # [kept] rows that go on after attention; None: all
    ) -> Tensor:  # [kept, hidden]
        qkv = self._qkv(self._normed(residual, self._attention_norm))
        q, k, v = self._heads(qkv, rotation)
        mixed = attend(self._index, q, k, v).reshape(len(residual), -1)
        if keep_rows is not None:
            mixed, residual = mixed[keep_rows], residual[keep_rows]
        residual += self._output(mixed)
        gate, up = self._gate_up(self._normed(residual, self._mlp_norm)).chunk(2, dim=-1)
        residual += self._down(F.silu(gate).mul_(up))
        return residual

    def _heads(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        by_head = qkv.view(len(qkv), -1, config.head_dim)
        rotated, v = by_head.split_with_sizes(
            [config.query_heads + config.kv_heads, config.kv_heads], dim=1
        )
        if self._qk_norm is not None:
            rotated = F.rms_norm(rotated, (config.head_dim,), eps=config.rms_eps) * self._qk_norm
        q, k = rotate(rotated, rotation).split_with_sizes(
            [config.query_heads, config.kv_heads], dim=1
        )
        return q, k, v

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self._config.hidden_size,), weight, self._config.rms_eps)


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
