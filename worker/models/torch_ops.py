"""The operations of a decoder layer in plain torch, for a CPU and as the reference."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.fused.heads import Heads
from stemserve.worker.models.chunked_gather import ChunkedGather, rows_at_once
from stemserve.worker.models.layer_ops import Gathered, Likeliest, PageWrites
from stemserve.worker.models.linear import Linear, ProductWay, fastest_linear
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.rope import RotaryEmbedding, Rotation, rotate

NOBODY = np.empty(0, np.int64)  # rows or tokens


class TorchOps:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.product_way = ProductWay()
        self._config = config
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def product_ways(self, rows: int) -> int:
        return 1

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self._config.hidden_size,), weight, self._config.rms_eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        residual += x
        return self.norm(residual, weight)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def heads(
        self, positions: Tensor, pages: PageWrites | None, into: Heads | None = None
    ) -> "TorchHeads":
        return TorchHeads(self._config, self._rotary.rotation(positions), pages, into)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return fastest_linear(weight, bias)

    def lm_head(self, weight: Tensor) -> "TorchLmHead":
        return TorchLmHead(fastest_linear(weight), rows_at_once(len(weight)))


class TorchLmHead:
    def __init__(self, linear: Linear, rows_at_once: int) -> None:
        self._linear = linear
        self.most_rows = rows_at_once
        self._gather = ChunkedGather(self.logits, rows_at_once)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden).float()

    def likeliest(self, hidden: Tensor) -> Likeliest:
        # Without ids nothing is read on the host.
        of_rows = self._gather(hidden, NOBODY, NOBODY)
        return Likeliest(of_rows.argmax, of_rows.likeliest)

    def gather(
        self, hidden: Tensor, rows: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> Gathered:
        return self._gather(hidden, rows, tokens)

    def gather_at(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Gathered:
        logits = self.logits(hidden)
        of_rows = logits.log_softmax(-1)
        return Gathered(
            of_rows[rows.long(), tokens.long()],
            logits.argmax(-1),
            of_rows.amax(-1),
            of_rows[:, 0].isnan(),
        )


class TorchHeads:
    """The heads of one step's rows."""

    def __init__(
        self,
        config: ModelConfig,
        rotation: Rotation,
        pages: PageWrites | None,
        into: Heads | None,
    ) -> None:
        self._config = config
        self._rotation = rotation
        self._pages = pages
        self._into = into

    def __call__(self, layer: int, qkv: Tensor, norm: Tensor | None) -> Heads:
        config = self._config
        by_head = qkv.view(len(qkv), -1, config.head_dim)
        rotated, v = by_head.split_with_sizes(
            [config.query_heads + config.kv_heads, config.kv_heads], dim=1
        )
        q, k = self.turned(rotated, norm).split_with_sizes(
            [config.query_heads, config.kv_heads], dim=1
        )
        if self._pages is not None:
            self._pages.write(layer, k, v)
        if self._into is None:
            return Heads(q, k, v)
        for place, values in zip(self._into, (q, k, v), strict=True):
            place.copy_(values)
        return self._into

    def turned(
        self,
        heads: Tensor,  # [rows, query_heads + kv_heads, head_dim]
        norm: Tensor | None,  # [query_heads + kv_heads, head_dim] gains
    ) -> Tensor:
        return turned_heads(heads, norm, self._rotation, self._config.rms_eps)


def turned_heads(heads: Tensor, norm: Tensor | None, rotation: Rotation, eps: float) -> Tensor:
    """Normed where the model does so, and rotated."""
    if norm is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], eps=eps) * norm
    return rotate(heads, rotation)
