"""Attention in float64, straight from the definitions: the oracle of every strategy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape


def attention(
    layout: AttentionLayout,
    q: Tensor,  # [rows, query_heads, head_dim]
    kv: LayerKV,
    shape: HeadShape,
) -> AttentionState:
    """Every segment by itself, over its gathered chain and its own rows."""
    states: list[AttentionState] = []
    for segment in range(layout.num_segments):
        begin, end = (int(i) for i in layout.segment_indptr[segment : segment + 2])
        keys, values = gather_chain(layout, segment, kv)
        chain, rows = len(keys), end - begin
        if layout.segment_is_item[segment]:
            keys = torch.cat([keys, kv.k_rows[begin:end].double()])
            values = torch.cat([values, kv.v_rows[begin:end].double()])
            last_visible = chain + torch.arange(rows)
        else:
            last_visible = chain - rows + torch.arange(rows)
        mask = torch.arange(len(keys)) <= last_visible.unsqueeze(1)
        states.append(masked_attention(q[begin:end], keys, values, mask, shape))
    if not states:
        return AttentionState(q.double(), q.new_zeros(q.shape[:2], dtype=torch.float64))
    return AttentionState(
        torch.cat([state.out for state in states]), torch.cat([state.lse for state in states])
    )


def gather_chain(
    layout: AttentionLayout, segment: int, kv: LayerKV
) -> tuple[Tensor, Tensor]:  # [chain, kv_heads, head_dim] twice
    keys, values = kv.k_rows[:0].double(), kv.v_rows[:0].double()
    for node in layout.chain(int(layout.segment_node[segment])):
        pages = torch.tensor(layout.pages(node).tolist(), dtype=torch.int64)
        tokens = int(layout.node_tokens[node])
        keys = torch.cat([keys, kv.k_pages[pages].flatten(0, 1)[:tokens].double()])
        values = torch.cat([values, kv.v_pages[pages].flatten(0, 1)[:tokens].double()])
    return keys, values


def masked_attention(
    q: Tensor,  # [rows, query_heads, head_dim]
    keys: Tensor,  # [tokens, kv_heads, head_dim]
    values: Tensor,  # [tokens, kv_heads, head_dim]
    mask: Tensor,  # [rows, tokens], True where the row sees the token
    shape: HeadShape,
) -> AttentionState:
    keys = keys.double().repeat_interleave(shape.group, dim=1)
    values = values.double().repeat_interleave(shape.group, dim=1)
    scores = torch.einsum("rhd,thd->rht", q.double(), keys) * shape.scale
    scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    floor = torch.where(torch.isneginf(lse), 0.0, lse)  # a row that sees nothing has weights 0
    weights = (scores - floor.unsqueeze(-1)).exp()
    return AttentionState(torch.einsum("rht,thd->rhd", weights, values), lse)


def merge_states(
    outs: Tensor,  # [parts, rows, heads, head_dim]
    lses: Tensor,  # [parts, rows, heads], natural log
) -> AttentionState:
    """One row and head at a time, over the parts that saw a key."""
    out = torch.zeros(outs.shape[1:], dtype=torch.float64)
    lse = torch.full(lses.shape[1:], -torch.inf, dtype=torch.float64)
    for row in range(lses.shape[1]):
        for head in range(lses.shape[2]):
            seen = lses[:, row, head].double().isfinite().nonzero().flatten()
            if len(seen):
                part_lse = lses[seen, row, head].double()
                weights = part_lse.softmax(dim=0)
                out[row, head] = weights @ outs[seen, row, head].double()
                lse[row, head] = part_lse.logsumexp(dim=0)
    return AttentionState(out, lse)


def tree_mask(parents: Sequence[int]) -> Tensor:  # [tokens, tokens]
    """Every token of a tree sees itself and its ancestors; a root has parent -1."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask
