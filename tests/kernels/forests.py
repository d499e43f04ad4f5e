"""Random layouts, with keys and values to go with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    parent: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    node: int
    rows: int
    is_item: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    layout: AttentionLayout
    shape: HeadShape
    q: Tensor
    kv: LayerKV


def make_layout(
    nodes: Sequence[Node],
    segments: Sequence[Segment],
    *,
    page_size: int = 16,
    shuffle: np.random.Generator | None = None,
) -> AttentionLayout:
    """Pages are handed out in order, or in random order where there is a generator."""
    pages = [-(-node.tokens // page_size) for node in nodes]
    indptr = np.append(0, np.cumsum(pages, dtype=np.int32))
    order = np.arange(indptr[-1]) if shuffle is None else shuffle.permutation(indptr[-1])
    return AttentionLayout(
        page_size=page_size,
        node_parent=int32([node.parent for node in nodes]),
        node_page_indptr=int32(indptr),
        node_pages=int32(order + 1),  # page 0 belongs to nobody
        node_tokens=int32([node.tokens for node in nodes]),
        segment_indptr=int32(np.append(0, np.cumsum([s.rows for s in segments], dtype=np.int32))),
        segment_node=int32([segment.node for segment in segments]),
        segment_is_item=np.array([segment.is_item for segment in segments], np.bool_),
    )


def used_slots(layout: AttentionLayout) -> Tensor:  # [slots of all nodes]
    slots: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = [np.empty(0, np.int64)]
    for node in range(layout.num_nodes):
        token = np.arange(layout.node_tokens[node])
        page = layout.pages(node)[token // layout.page_size].astype(np.int64)
        slots.append(page * layout.page_size + token % layout.page_size)
    return torch.from_numpy(np.concatenate(slots))


def random_inputs(
    layout: AttentionLayout,
    shape: HeadShape,
    rng: np.random.Generator,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Slots that hold no token are NaN."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    pages = int(layout.node_pages.max(initial=0)) + 2
    slots = (pages * layout.page_size, shape.kv_heads, shape.head_dim)
    used = used_slots(layout)
    k, v = torch.full(slots, torch.nan, dtype=dtype), torch.full(slots, torch.nan, dtype=dtype)
    k[used], v[used] = normal(len(used), *slots[1:]), normal(len(used), *slots[1:])
    paged = (pages, layout.page_size, *slots[1:])
    rows = (layout.num_rows, shape.kv_heads, shape.head_dim)
    return Inputs(
        layout=layout,
        shape=shape,
        q=normal(layout.num_rows, shape.query_heads, shape.head_dim),
        kv=LayerKV(k.view(paged), v.view(paged), normal(*rows), normal(*rows)),
    )


def random_layout(
    rng: np.random.Generator, *, page_size: int, decode: bool = False, max_tokens: int = 80
) -> AttentionLayout:
    """A forest with empty, one-token and branching nodes; segments of all kinds."""
    parents = [
        int(rng.integers(-1, node)) if rng.random() < 0.8 else -1
        for node in range(rng.integers(1, 9))
    ]
    nodes: list[Node] = []
    for node, parent in enumerate(parents):
        tokens = int(rng.integers(0, max_tokens)) if rng.random() < 0.8 else int(rng.integers(0, 2))
        if node in parents:
            tokens = tokens // page_size * page_size
        nodes.append(Node(parent=parent, tokens=tokens))
    segments: list[Segment] = []
    for _ in range(rng.integers(1, 12)):
        node = int(rng.integers(-1, len(nodes)))
        is_item = not decode and bool(rng.random() < 0.6)
        rows = 1 if decode else int(rng.choice([0, 1, 2, 5, 8, 20, 40]))
        segments.append(Segment(node=node, rows=rows, is_item=is_item))
    shuffle = rng if rng.random() < 0.5 else None
    return make_layout(nodes, segments, page_size=page_size, shuffle=shuffle)
