"""Forests for tree decode, spelt out as (parent, tokens), with pages of random KV."""

import numpy as np
import torch

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32

PAGE = 16
SPARE_PAGES = 3  # of no node
Nodes = list[tuple[int, int]]  # parent, tokens


def layout_of(
    nodes: Nodes,
    segments: list[tuple[int, int]],
    page: int = PAGE,
    rng: np.random.Generator | None = None,
    items: list[bool] | None = None,
) -> AttentionLayout:
    """`segments`: node and rows of each. Pages are in random order, pages of no node among them."""
    rng = rng or np.random.default_rng(0)
    count = np.array([-(-tokens // page) for _, tokens in nodes], np.int64)
    indptr = np.concatenate([[0], np.cumsum(count)])
    return AttentionLayout(
        page_size=page,
        node_parent=int32([parent for parent, _ in nodes]),
        node_page_indptr=int32(indptr),
        node_pages=int32(rng.permutation(int(indptr[-1]) + SPARE_PAGES)[: indptr[-1]]),
        node_tokens=int32([tokens for _, tokens in nodes]),
        segment_indptr=int32(np.concatenate([[0], np.cumsum([rows for _, rows in segments])])),
        segment_node=int32([node for node, _ in segments]),
        segment_is_item=np.array(items or [False] * len(segments), np.bool_),
    )


def leaves_of(nodes: Nodes) -> list[tuple[int, int]]:
    inner = {parent for parent, _ in nodes}
    return [(node, 1) for node in range(len(nodes)) if node not in inner]


def levels(counts: list[int], tokens: list[int]) -> Nodes:
    nodes: Nodes = []
    above: list[int] = []
    for count, length in zip(counts, tokens, strict=True):
        row = [
            (above[child * len(above) // count] if above else -1, length) for child in range(count)
        ]
        above = list(range(len(nodes), len(nodes) + count))
        nodes += row
    return nodes


def random_kv(
    layout: AttentionLayout, shape: HeadShape, dtype: torch.dtype, device: torch.device
) -> LayerKV:
    """Fresh pages; every slot that no node fills holds NaN."""
    pages = len(layout.node_pages) + SPARE_PAGES
    size = (pages, layout.page_size, shape.kv_heads, shape.head_dim)
    filled = torch.zeros(size[:2], dtype=torch.bool)
    for node in range(layout.num_nodes):
        tokens = np.arange(int(layout.node_tokens[node]))
        filled[layout.pages(node)[tokens // layout.page_size], tokens % layout.page_size] = True

    def poisoned() -> torch.Tensor:
        stored = torch.randn(size).to(dtype).float()
        stored[~filled] = torch.nan
        return stored.to(dtype).to(device)

    is_item = np.repeat(layout.segment_is_item, layout.segment_rows)

    def own_rows() -> torch.Tensor:
        """Part of a wider row, as in a fused projection; rows of stored segments hold NaN."""
        rows = torch.randn((layout.num_rows, shape.kv_heads + 1, shape.head_dim)).to(dtype).float()
        rows[~device_tensor(is_item, rows.device)] = torch.nan
        return rows.to(dtype).to(device)[:, 1:]

    return LayerKV(poisoned(), poisoned(), own_rows(), own_rows())


def chain_slots(layout: AttentionLayout, segment: int, device: torch.device) -> torch.Tensor:
    slots = [
        layout.pages(node)[tokens // layout.page_size].astype(np.int64) * layout.page_size
        + tokens % layout.page_size
        for node in layout.chain(int(layout.segment_node[segment]))
        for tokens in [np.arange(int(layout.node_tokens[node]))]
    ]
    return index_tensor(np.concatenate([np.empty(0, np.int64), *slots]), device)
