"""Random inputs for a layout of prefill, and exact rows of its result."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from kernel_trees import node_slots
from numpy.typing import NDArray

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape

CHECKED_ROWS = 24  # of the output, beside the first and last


def inputs(
    layout: AttentionLayout, heads: HeadShape, dtype: torch.dtype
) -> tuple[torch.Tensor, LayerKV]:
    """Random q and K/V; the rows of a stored segment have the K/V that its pages have."""
    pages = (len(layout.node_pages), layout.page_size, heads.kv_heads, heads.head_dim)
    k_pages, v_pages = (torch.randn(pages, dtype=dtype, device="cuda") for _ in range(2))
    rows = (layout.num_rows, heads.kv_heads, heads.head_dim)
    k_rows, v_rows = (torch.randn(rows, dtype=dtype, device="cuda") for _ in range(2))
    for segment in np.flatnonzero(~layout.segment_is_item):
        begin, end = (int(i) for i in layout.segment_indptr[segment : segment + 2])
        own = torch.from_numpy(chain_slots(layout, int(segment))[begin - end :]).cuda()
        k_rows[begin:end] = k_pages.flatten(0, 1)[own]
        v_rows[begin:end] = v_pages.flatten(0, 1)[own]
    q = torch.randn(layout.num_rows, heads.query_heads, heads.head_dim, dtype=dtype, device="cuda")
    return q, LayerKV(k_pages, v_pages, k_rows, v_rows)


def chain_slots(layout: AttentionLayout, segment: int) -> NDArray[np.int64]:
    nodes = layout.chain(int(layout.segment_node[segment]))
    return np.concatenate([np.empty(0, np.int64), *(node_slots(layout, node) for node in nodes)])


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The first, the last and some random rows, in float64."""

    rows: list[int]
    exact: torch.Tensor  # [rows, query_heads, head_dim]

    @classmethod
    def of(cls, layout: AttentionLayout, q: torch.Tensor, kv: LayerKV, heads: HeadShape) -> Self:
        drawn = np.random.default_rng(layout.num_rows).integers(0, layout.num_rows, CHECKED_ROWS)
        rows = [0, layout.num_rows - 1, *(int(row) for row in drawn)]
        exact = torch.stack([exact_row(layout, q, kv, heads, row) for row in rows])
        return cls(rows=rows, exact=exact)

    def error(self, out: torch.Tensor) -> float:
        return float((out[self.rows].double() - self.exact).norm() / self.exact.norm())


def exact_row(
    layout: AttentionLayout, q: torch.Tensor, kv: LayerKV, heads: HeadShape, row: int
) -> torch.Tensor:  # [query_heads, head_dim]
    segment = int(np.searchsorted(layout.segment_indptr, row, side="right")) - 1
    begin, end = (int(i) for i in layout.segment_indptr[segment : segment + 2])
    slots = chain_slots(layout, segment)
    item = bool(layout.segment_is_item[segment])
    if not item:
        slots = slots[: len(slots) - (end - 1 - row)]
    index = torch.from_numpy(slots).to(q.device)
    own = slice(begin, row + 1 if item else begin)
    keys, values = (
        torch.cat([pages.flatten(0, 1)[index], rows[own]]).double().transpose(0, 1)
        for pages, rows in ((kv.k_pages, kv.k_rows), (kv.v_pages, kv.v_rows))
    )
    queries = q[row].double().view(heads.kv_heads, heads.group, heads.head_dim)
    weights = (queries @ keys.transpose(1, 2) * heads.scale).softmax(-1)
    return (weights @ values).view(heads.query_heads, heads.head_dim)
