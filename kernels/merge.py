"""Partial attention results over disjoint keys, joined row by row in one launch."""

from typing import Any

from torch import Tensor

from stemserve.kernels import merge_triton
from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.repeated_launch import RepeatedLaunch

KERNELS: Any = merge_triton  # untyped: device code
HEADS = 8  # of a program


class RowMerge:
    """The same rows of every layer's results."""

    def __init__(self, shape: HeadShape, parts: Tensor, targets: Tensor) -> None:
        """parts: int32 [merged rows, columns], rows that are joined, or -1; targets: int32
        [merged rows], where to. A part without a key has lse -inf, +inf or NaN.
        """
        heads = min(HEADS, _power_of_2(shape.query_heads))
        programs = -(-shape.query_heads // heads)
        self._parts = parts
        self._targets = targets
        self._launch = RepeatedLaunch(
            KERNELS.merge_rows,
            len(targets) * programs,
            HEADS=shape.query_heads,
            DIM=shape.head_dim,
            COLUMNS=_power_of_2(shape.head_dim),
            BLOCK=heads,
            PROGRAMS=programs,
        )

    def run(self, source: AttentionState, target: AttentionState) -> None:
        """Contiguous states; they may be one, if no row that is read is written."""
        tensors = (self._parts, source.out, source.lse, self._targets, target.out, target.lse)
        self._launch(tensors, (self._parts.shape[1],))


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
