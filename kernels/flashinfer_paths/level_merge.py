"""Attention over disjoint keys, level by level, joined in one launch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.flashinfer_paths import level_merge_triton
from stemserve.kernels.repeated_launch import RepeatedLaunch

KERNELS: Any = level_merge_triton  # untyped: device code
PAIRS = 4  # of a row and a head, of one program
MAX_LEVELS = 31  # bits of `seen`


class LevelParts(NamedTuple):
    """Parts of rows in the order of the levels; what a row does not see may hold anything."""

    outs: Tensor  # [levels, rows, heads, head_dim]
    lses: Tensor  # [levels, rows, heads], float32, to base 2

    @classmethod
    def empty(cls, levels: int, q: Tensor) -> "LevelParts":
        return cls(
            torch.empty(levels, *q.shape, dtype=q.dtype, device=q.device),
            torch.empty(levels, *q.shape[:2], dtype=torch.float32, device=q.device),
        )


class LevelMerge:
    """The answer of every row, with a natural log-sum-exp."""

    def __init__(
        self, levels: int, seen: Tensor, targets: Tensor, heads: int, head_dim: int
    ) -> None:
        """seen: int32 [rows], a bit for each level in which the row sees a token; with none, out
        is 0 and lse -inf. targets: int32 [rows], the result's row of each.
        """
        self._seen = seen
        self._targets = targets
        self._launch = RepeatedLaunch(
            KERNELS.merge_levels,
            -(-len(seen) * heads // PAIRS),
            LEVELS=levels,
            DIM=head_dim,
            COLUMNS=1 << (head_dim - 1).bit_length(),
            PAIRS=PAIRS,
            num_warps=1,
        )

    def run(self, parts: LevelParts) -> AttentionState:
        _, rows, heads, _ = parts.outs.shape
        out = parts.outs.new_empty(parts.outs.shape[1:])
        lse = parts.lses.new_empty(parts.lses.shape[1:])
        if rows:
            tensors = (self._targets, parts.outs, parts.lses, self._seen, out, lse)
            self._launch(tensors, (rows * heads, heads))
        return AttentionState(out, lse)
