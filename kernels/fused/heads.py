"""The heads of a step's rows, split from the packed projection."""

from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """What attention reads; rows may be strided, heads and head_dim are contiguous."""

    q: Tensor  # [rows, query_heads, head_dim]
    k: Tensor  # [rows, kv_heads, head_dim]
    v: Tensor  # [rows, kv_heads, head_dim]
