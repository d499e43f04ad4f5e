"""Attention over part of the keys, and the algebra that joins parts."""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionState(NamedTuple):
    """Softmax-weighted values over some keys, with the log-sum-exp of their scores."""

    out: Tensor  # [rows, query_heads, head_dim]
    lse: Tensor  # [rows, query_heads], float32, natural log; -inf where no key was visible


class LayerKV(NamedTuple):
    """Keys and values of one layer."""

    k_pages: Tensor  # [pages, page_size, kv_heads, head_dim]
    v_pages: Tensor  # [pages, page_size, kv_heads, head_dim]
    k_rows: Tensor  # [rows, kv_heads, head_dim], this step's own rows of the group
    v_rows: Tensor  # [rows, kv_heads, head_dim]


def merge_states(
    outs: Tensor,  # [parts, rows, heads, head_dim]
    lses: Tensor,  # [parts, rows, heads], float32, natural log
) -> AttentionState:
    """Combine attention over disjoint key sets into attention over their union.

    A row that no part sees gets out 0 and lse -inf; some kernels mark such a row with +inf, so a
    part with +inf counts as empty too. (The merge of FlashAttention's split-KV and of
    FlashInfer's cascade; POR in the CoDec paper.)
    """
    lses = torch.where(torch.isposinf(lses), -torch.inf, lses)
    peak = lses.amax(dim=0)
    peak = torch.where(torch.isneginf(peak), torch.zeros_like(peak), peak)
    weights = (lses - peak).exp()
    total = weights.sum(dim=0)
    # A part with weight 0 may hold anything, NaN included.
    parts = torch.where((weights > 0).unsqueeze(-1), outs.float(), 0.0)
    out = (parts * weights.unsqueeze(-1)).sum(dim=0) / total.clamp_min(1e-30).unsqueeze(-1)
    return AttentionState(out.to(outs.dtype), peak + total.log())
