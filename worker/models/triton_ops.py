"""The operations of a decoder layer on a CUDA device: each one launch of a fused kernel."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.fused.gate import silu_mul
from stemserve.kernels.fused.heads import Heads
from stemserve.kernels.fused.logits import FEW_ROWS, chosen_logprobs, has_aligned_rows
from stemserve.kernels.fused.norm import add_rms_norm, rms_norm
from stemserve.kernels.fused.skinny_linear import MOST_ROWS
from stemserve.kernels.fused.split_heads import HeadTransform, PageTarget, split_heads
from stemserve.kernels.host_array import index_tensor
from stemserve.worker.models.chunked_gather import rows_at_once
from stemserve.worker.models.layer_ops import Gathered, Likeliest, LmHead, PageWrites
from stemserve.worker.models.linear import DenseLinear, Linear, ProductWay
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.rope import RotaryEmbedding
from stemserve.worker.models.skinny_linear import AHEAD, SkinnyLinear
from stemserve.worker.models.torch_ops import TorchLmHead


class TritonOps:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._eps = config.rms_eps
        self._transform = HeadTransform(
            shape=config.heads, table=rotation_table(config, device), eps=config.rms_eps
        )
        self._last_linear: SkinnyLinear | None = None
        self.product_way = ProductWay()

    def product_ways(self, rows: int) -> int:
        own = self._last_linear is not None and rows <= MOST_ROWS
        return 1 + len(AHEAD) if own else 1

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm(x, residual, weight, self._eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up, self._transform.dtype)

    def heads(
        self, positions: Tensor, pages: PageWrites | None, into: Heads | None = None
    ) -> "TritonHeads":
        return TritonHeads(self._transform, positions, pages, into)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        self._transform = replace(self._transform, dtype=weight.dtype)
        if weight.dtype.itemsize > 2 or not has_aligned_rows(weight):
            return DenseLinear(weight, bias)
        linear = SkinnyLinear(weight, bias, self.product_way)
        if self._last_linear is not None:
            self._last_linear.following = linear
        self._last_linear = linear
        return linear

    def lm_head(self, weight: Tensor) -> LmHead:
        # For float32 the library's product is the faster one.
        if weight.dtype == torch.float32 or not has_aligned_rows(weight):
            return TorchLmHead(DenseLinear(weight), rows_at_once(len(weight)))
        return FusedLmHead(weight)


class TritonHeads:
    """The heads of one step's rows."""

    def __init__(
        self,
        transform: HeadTransform,
        positions: Tensor,
        pages: PageWrites | None,
        into: Heads | None,
    ) -> None:
        self._transform = transform
        self._positions = positions
        self._pages = pages
        self._into = into

    def __call__(self, layer: int, qkv: Tensor, norm: Tensor | None) -> Heads:
        target = self._target(layer)
        return split_heads(qkv, self._positions, norm, self._transform, target, self._into)

    def _target(self, layer: int) -> PageTarget | None:
        if self._pages is None:
            return None
        pages = self._pages
        return PageTarget(
            k_pages=pages.k_pages(layer), v_pages=pages.v_pages(layer), slots=pages.slots
        )


class FusedLmHead:
    """Logits are float32 sums, not rounded in between."""

    most_rows = 1 << 20  # it keeps no logits

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight  # [vocab, hidden]
        self._nothing = torch.empty(0, dtype=torch.int64, device=weight.device)
        # Compiled now, for few and for many rows, and not in the middle of a call.
        for rows in (1, FEW_ROWS.rows + 1):
            hidden = weight.new_zeros((rows, weight.shape[1]))
            self.gather(hidden, np.zeros(1, np.int64), np.zeros(1, np.int64))

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.mm(hidden, self._weight.T, out_dtype=torch.float32)

    def likeliest(self, hidden: Tensor) -> Likeliest:
        nothing = self._nothing
        chosen = chosen_logprobs(hidden, self._weight, nothing, nothing)
        return Likeliest(chosen.argmax, chosen.likeliest)

    def gather(
        self,
        hidden: Tensor,  # [rows, hidden]
        rows: NDArray[np.integer],  # [chosen]
        tokens: NDArray[np.integer],  # [chosen]
    ) -> Gathered:
        """Without the logits of tokens that nobody asked for."""
        at = index_tensor(np.stack((rows, tokens)), hidden.device)
        return self.gather_at(hidden, at[0], at[1])

    def gather_at(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Gathered:
        chosen = chosen_logprobs(hidden, self._weight, rows, tokens)
        failed = ~chosen.lse.isfinite()
        return Gathered(chosen.logprobs, chosen.argmax, chosen.likeliest, failed)


def rotation_table(
    config: ModelConfig, device: torch.device
) -> Tensor:  # [context_tokens, 2, head_dim / 2] float32: cosines, then sines
    rotary = RotaryEmbedding(config.rope, config.head_dim, device)
    return torch.cat(rotary.rotation(torch.arange(config.context_tokens, device=device)), dim=1)
