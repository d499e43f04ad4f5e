"""Copies tokens out of the pages and the step's own rows, so that they lie in one tensor.

What pages keep as float8 is widened on the way.
"""

from typing import Any

import torch
from torch import Tensor

from stemserve.kernels import page_gather_triton
from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.repeated_launch import RepeatedLaunch

KERNELS: Any = page_gather_triton  # untyped: device code
ELEMENTS = 4096  # of K that a program copies, and as many of V
GROWTH_TOKENS = 4096


class TokenScratch:
    """K and V of the tokens of one layer, for a strategy to read at once; every layer reuses it.

    All strategies of a device may share one: what they copy is read before the stream goes on.
    """

    def __init__(
        self, shape: HeadShape, device: torch.device, dtype: torch.dtype, *, max_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self._heads = (shape.kv_heads, shape.head_dim)
        self.device = device
        self._dtype = dtype
        self._kv = self._allocate(0)

    @property
    def capacity(self) -> int:
        return self._kv.shape[1]

    def tokens(self, tokens: int) -> tuple[Tensor, Tensor]:  # [tokens, kv_heads, head_dim] twice
        """For a plan to write and read; what is there lasts no longer than a layer's attention.

        ValueError: more than `max_tokens`.
        """
        if tokens > self.max_tokens:
            raise ValueError(f"{tokens} tokens do not fit a scratch of {self.max_tokens}")
        if tokens > self.capacity:
            wanted = -(-max(tokens, 2 * self.capacity) // GROWTH_TOKENS) * GROWTH_TOKENS
            self._kv = self._allocate(min(wanted, max(self.max_tokens, tokens)))
        return self._kv[0, :tokens], self._kv[1, :tokens]

    def _allocate(self, tokens: int) -> Tensor:
        return torch.empty(2, tokens, *self._heads, dtype=self._dtype, device=self.device)


class TokenCopy:
    """A copy of the tokens that `sources` names, once a layer, to the same place."""

    def __init__(self, sources: Tensor, k: Tensor, v: Tensor) -> None:
        """sources: int32 [tokens], see token_sources.py; k, v: [tokens, kv_heads, head_dim]."""
        width = k.shape[1] * k.shape[2]
        columns = 1 << (width - 1).bit_length()
        block = max(1, ELEMENTS // columns)
        self._sources = sources
        self.k = k
        self.v = v
        self._launch = RepeatedLaunch(
            KERNELS.gather_tokens,
            -(-len(sources) // block),
            WIDTH=width,
            COLUMNS=columns,
            TOKENS=block,
        )

    def run(self, kv: LayerKV) -> None:
        count = len(self._sources)
        if not count:
            return
        k_rows, v_rows = _packed_rows(kv.k_rows), _packed_rows(kv.v_rows)
        self._launch(
            (self._sources, kv.k_pages, kv.v_pages, k_rows, v_rows, self.k, self.v),
            (count, k_rows.stride(0), v_rows.stride(0)),
        )


def _packed_rows(rows: Tensor) -> Tensor:
    """Rows may be a view of a projection, as long as the heads of a row lie together."""
    packed = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if packed else rows.contiguous()
