"""The operations of a decoder layer on a CUDA device, so that a row's bits do not depend on others.

The fused kernels have a program a row, or more; what is left are the matrix products.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.fixed.product import fixed_product, tiles_agree
from stemserve.kernels.fused.logits import chosen_logprobs, has_aligned_rows
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.sampling.draw import draw_tokens
from stemserve.kernels.sampling.slot_tables import SlotTables
from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.layer_ops import Gathered, Likeliest
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.triton_ops import TritonOps

LOGIT_ROWS = 256  # in memory at once


class FixedTritonOps(TritonOps):
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._checked: set[tuple[int, ...]] = set()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> "FixedLinear":
        if weight.shape not in self._checked:
            check_tiles(weight, bias, weight.dtype)
            self._checked.add(weight.shape)
        return FixedLinear(weight, bias)

    def lm_head(self, weight: Tensor) -> "FixedLmHead":
        check_tiles(weight, None, torch.float32)
        return FixedLmHead(weight)


def check_tiles(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if not has_aligned_rows(weight):
        raise ModelError(
            f"rows of {weight.shape[1]} weights of {weight.dtype} do not start at multiples of 16 "
            "bytes: no deterministic matrix products"
        )
    if not tiles_agree(weight, bias, out_dtype=out_dtype):
        raise ModelError(
            f"tiles of a product with weights {tuple(weight.shape)} of {weight.dtype} round "
            "differently on this GPU: no deterministic results here"
        )


class FixedLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return fixed_product(x, self._weight, self._bias)


class FixedLmHead:
    """Logits are float32 sums, not rounded in between."""

    most_rows = 1 << 20  # that are gathered at once: no logits are kept

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight  # [vocab, hidden]
        self._greedy = SlotTables(0, weight.device)  # of the spare slot alone

    def logits(self, hidden: Tensor) -> Tensor:
        return fixed_product(hidden, self._weight, out_dtype=torch.float32)

    def likeliest(self, hidden: Tensor) -> Likeliest:
        """As it is drawn beside samples that are not greedy."""
        found = [
            self._likeliest(hidden[start : start + LOGIT_ROWS])
            for start in range(0, max(1, len(hidden)), LOGIT_ROWS)
        ]
        if len(found) == 1:
            return found[0]
        return Likeliest(
            torch.cat([part.tokens for part in found]), torch.cat([part.logprobs for part in found])
        )

    def _likeliest(self, hidden: Tensor) -> Likeliest:
        slots = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        drawn = draw_tokens(self.logits(hidden), self._greedy, slots, slots)
        return Likeliest(drawn.tokens, drawn.logprobs)

    def gather(
        self,
        hidden: Tensor,  # [rows, hidden]
        rows: NDArray[np.integer],  # [chosen]
        tokens: NDArray[np.integer],  # [chosen]
    ) -> Gathered:
        if not len(tokens):
            found = self.likeliest(hidden)
            failed = ~found.logprobs.isfinite()
            return Gathered(found.logprobs[:0], found.tokens, found.logprobs, failed)
        at = index_tensor(np.stack((rows, tokens)), hidden.device)
        return self.gather_at(hidden, at[0], at[1])

    def gather_at(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Gathered:
        chosen = chosen_logprobs(hidden, self._weight, rows, tokens)
        failed = ~chosen.lse.isfinite()
        return Gathered(chosen.logprobs, chosen.argmax, chosen.likeliest, failed)
