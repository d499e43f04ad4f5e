"""Attention of a batch of row blocks over contiguous keys, with the log-sum-exp of each row."""

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.layout import HeadShape

# Folding the query heads of a group into rows copies q and the output; it pays where few rows
# read many keys. 4 rows over 2048 keys, 9/3 heads, d 64: 0.25 ms folded, 0.35 ms not; over 256
# keys, or from 16 rows on: no difference.
MAX_FOLDED_ROWS = 8
MIN_FOLDED_KEYS = 512


def attend(
    q: Tensor,  # [batch, rows, query_heads, head_dim]
    k: Tensor,  # [batch, tokens, kv_heads, head_dim]
    v: Tensor,  # [batch, tokens, kv_heads, head_dim]
    shape: HeadShape,
    *,
    causal: bool = False,  # row i sees tokens 0..i, however many tokens there are
    mask: Tensor | None = None,  # [batch or 1, 1, rows or 1, tokens] float32, added to the scores
) -> AttentionState:  # [batch, rows, query_heads, head_dim], [batch, rows, query_heads]
    """Every row must see at least one token."""
    if q.device.type != "cpu":
        hidden = causal_mask(q.shape[1], k.shape[1], q.device) if causal else mask
        return attend_by_matmul(q, k, v, shape, hidden)
    rows_alike = not causal and (mask is None or mask.shape[2] == 1)
    few_rows = q.shape[1] <= MAX_FOLDED_ROWS and k.shape[1] >= MIN_FOLDED_KEYS
    if rows_alike and few_rows and shape.group > 1:
        return _attend_folded(q, k, v, shape, mask)
    return _flash(q, k, v, shape, causal, mask)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, shape: HeadShape, causal: bool, mask: Tensor | None
) -> AttentionState:
    """The kernel takes strides and shared KV heads as they are: nothing is copied."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        causal,
        attn_mask=mask,
        scale=shape.scale,
    )
    return AttentionState(out.transpose(1, 2), lse.transpose(1, 2))


def _attend_folded(
    q: Tensor, k: Tensor, v: Tensor, shape: HeadShape, mask: Tensor | None
) -> AttentionState:
    batch, rows = q.shape[:2]
    heads, group, head_dim = shape.kv_heads, shape.group, shape.head_dim
    grouped = q.view(batch, rows, heads, group, head_dim).transpose(2, 3)
    folded = grouped.reshape(batch, rows * group, heads, head_dim)
    out, lse = _flash(folded, k, v, shape, False, mask)
    return AttentionState(
        out.view(batch, rows, group, heads, head_dim).transpose(2, 3).flatten(2, 3),
        lse.view(batch, rows, group, heads).transpose(2, 3).flatten(2, 3),
    )


def causal_mask(rows: int, tokens: int, device: torch.device) -> Tensor:  # [1, 1, rows, tokens]
    hidden = torch.ones(rows, tokens, dtype=torch.bool, device=device).triu(1)
    return torch.zeros(rows, tokens, device=device).masked_fill_(hidden, -torch.inf)[None, None]


def attend_by_matmul(
    q: Tensor,  # [batch, rows, query_heads, head_dim]
    k: Tensor,  # [batch, tokens, kv_heads, head_dim]
    v: Tensor,  # as k
    shape: HeadShape,
    mask: Tensor | None,  # added to [batch, query_heads, rows, tokens] scores
) -> AttentionState:
    """On any device, in float32; the scores are in memory as a whole."""
    batch, rows = q.shape[:2]
    heads = (shape.kv_heads, shape.group)
    grouped = q.float().reshape(batch, rows, *heads, shape.head_dim).permute(0, 2, 3, 1, 4)
    folded = grouped.reshape(batch, shape.kv_heads, shape.group * rows, shape.head_dim)
    scores = folded @ k.float().permute(0, 2, 3, 1) * shape.scale
    scores = scores.view(batch, shape.query_heads, rows, -1)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().view(batch, shape.kv_heads, -1, k.shape[1])
    out = (weights @ v.float().transpose(1, 2)).view(batch, shape.query_heads, rows, -1)
    return AttentionState(out.transpose(1, 2).to(q.dtype), lse.transpose(1, 2))
