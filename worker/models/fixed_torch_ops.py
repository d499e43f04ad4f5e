"""The operations of a decoder layer in torch, so that a row's bits do not depend on the others."""

from functools import partial

import torch
from torch import Tensor

from stemserve.kernels.fused.heads import Heads
from stemserve.worker.models.layer_ops import PageWrites
from stemserve.worker.models.linear import Linear, ProductWay, fastest_linear
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.rope import RotaryEmbedding, Rotation
from stemserve.worker.models.row_blocks import ROWS, BlockLinear, by_blocks, check_places
from stemserve.worker.models.torch_ops import TorchHeads, TorchLmHead, TorchOps, turned_heads


class FixedTorchOps:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.product_way = ProductWay()
        self._config = config
        self._plain = TorchOps(config, device)
        rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        # An angle's cosine is the same in every step: it is made once.
        self._rotations = rotary.rotation(torch.arange(config.context_tokens, device=device))
        self._checked: set[tuple[int, ...]] = set()

    def product_ways(self, rows: int) -> int:
        return 1

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return by_blocks(partial(self._plain.norm, weight=weight), x)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        residual += x
        return self.norm(residual, weight)

    def gate(self, gate_up: Tensor) -> Tensor:
        return by_blocks(self._plain.gate, gate_up)

    def heads(
        self, positions: Tensor, pages: PageWrites | None, into: Heads | None = None
    ) -> "FixedTorchHeads":
        rotation = Rotation(*(part[positions] for part in self._rotations))
        return FixedTorchHeads(self._config, rotation, pages, into)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        linear = fastest_linear(weight, bias)
        if weight.shape not in self._checked:
            check_places(linear, weight)
            self._checked.add(weight.shape)
        return BlockLinear(linear)

    def lm_head(self, weight: Tensor) -> TorchLmHead:
        return TorchLmHead(self.linear(weight), ROWS)


class FixedTorchHeads(TorchHeads):
    def turned(self, heads: Tensor, norm: Tensor | None) -> Tensor:
        def turn(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return turned_heads(rows, norm, Rotation(cos, sin), self._config.rms_eps)

        return by_blocks(turn, heads, *self._rotation)
