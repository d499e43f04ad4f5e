"""Attention over disjoint keys, level by level, joined in one launch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stemserve.kernels import level_merge_triton
from stemserve.kernels.attention_state import AttentionState

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


def merged(parts: LevelParts, seen: Tensor, targets: Tensor) -> AttentionState:
    """The answer of every row, with a natural log-sum-exp.

    seen: int32 [rows], a bit for each level in which the row sees a token; with none, out is 0
    and lse -inf. targets: int32 [rows], the result's row of each.
    """
    levels, rows, heads, head_dim = parts.outs.shape
    out = torch.empty(parts.outs.shape[1:], dtype=parts.outs.dtype, device=parts.outs.device)
    lse = torch.empty(parts.lses.shape[1:], dtype=torch.float32, device=parts.lses.device)
    if rows:
        KERNELS.merge_levels[(-(-rows * heads // PAIRS),)](
            parts.outs,
            parts.lses,
            seen,
            targets,
            out,
            lse,
            rows * heads,
            heads,
            LEVELS=levels,
            DIM=head_dim,
            COLUMNS=1 << (head_dim - 1).bit_length(),
            PAIRS=PAIRS,
            num_warps=1,
        )
    return AttentionState(out, lse)
