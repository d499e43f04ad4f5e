"""Layouts for tests, random or spelt out, with keys and values to go with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    parent: int = -1
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    node: int = 0
    rows: int = 1
    is_item: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    layout: AttentionLayout
    shape: HeadShape
    q: Tensor
    kv: LayerKV


def floats(tensor: Tensor) -> list[float]:  # of one dimension
    return [float(value) for value in tensor]


def head_shape(query_heads: int, kv_heads: int, head_dim: int) -> HeadShape:
    return HeadShape(
        query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )


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
    order = np.arange(int(indptr[-1]))
    if shuffle is not None:
        shuffle.shuffle(order)
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


def items_over(prefix: int, lengths: Sequence[int], *, page_size: int = 16) -> AttentionLayout:
    segments = [Segment(rows=rows, is_item=True) for rows in lengths]
    return make_layout([Node(tokens=prefix)], segments, page_size=page_size)


def used_slots(layout: AttentionLayout) -> Tensor:  # [tokens of all nodes]
    slots = [torch.empty(0, dtype=torch.int64)]
    for node in range(layout.num_nodes):
        pages = torch.tensor(layout.pages(node).tolist(), dtype=torch.int64)
        token = torch.arange(layout.page_size)
        in_pages = (pages.unsqueeze(1) * layout.page_size + token).flatten()
        slots.append(in_pages[: int(layout.node_tokens[node])])
    return torch.cat(slots)


def random_inputs(
    layout: AttentionLayout, shape: HeadShape, seed: int, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Slots that hold no token are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    used = used_slots(layout)
    heads = (shape.kv_heads, shape.head_dim)
    q = normal(layout.num_rows, shape.query_heads, shape.head_dim)
    k_pages, v_pages = (paged(layout, normal(len(used), *heads)) for _ in range(2))
    rows, slots = stored_rows(layout)
    k_rows, v_rows = (normal(layout.num_rows, *heads) for _ in range(2))
    k_rows[rows], v_rows[rows] = k_pages.flatten(0, 1)[slots], v_pages.flatten(0, 1)[slots]
    return Inputs(layout=layout, shape=shape, q=q, kv=LayerKV(k_pages, v_pages, k_rows, v_rows))


def stored_rows(layout: AttentionLayout) -> tuple[Tensor, Tensor]:
    """Rows of stored segments, and the slots that hold their keys and values too."""
    rows: list[int] = []
    slots: list[int] = []
    for segment in np.flatnonzero(~layout.segment_is_item).tolist():
        chain = int(layout.chain_tokens[segment])
        stop = int(layout.segment_indptr[segment + 1])
        start = max(int(layout.segment_indptr[segment]), stop - chain)
        token = np.arange(chain - (stop - start), chain)
        pages = layout.chain_pages(int(layout.segment_node[segment]))
        rows += range(start, stop)
        in_pages = pages[token // layout.page_size] * layout.page_size + token % layout.page_size
        slots += in_pages.tolist()
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)


def z_inputs(layout: AttentionLayout, shape: HeadShape) -> Inputs:
    """Q is 0 and V[j] is j squared, so a row's answer is the mean of j squared over what it sees.

    j counts the stored tokens node by node, and then the rows of the items.
    """
    stored = int(layout.node_tokens.sum())
    is_own = np.repeat(layout.segment_is_item, layout.segment_rows)
    own_number = torch.tensor((stored + np.cumsum(is_own) - 1).tolist(), dtype=torch.float32)
    heads = (shape.kv_heads, shape.head_dim)
    keys = torch.ones(stored, *heads)
    squares = torch.arange(stored, dtype=torch.float32).square()[:, None, None].expand(-1, *heads)
    return Inputs(
        layout=layout,
        shape=shape,
        q=torch.zeros(layout.num_rows, shape.query_heads, shape.head_dim),
        kv=LayerKV(
            paged(layout, keys),
            paged(layout, squares),
            torch.ones(layout.num_rows, *heads),
            own_number.square()[:, None, None].repeat(1, *heads),
        ),
    )


def paged(layout: AttentionLayout, tokens: Tensor) -> Tensor:
    """The pool that holds the tokens of all nodes, in their order; NaN elsewhere."""
    pages = int(layout.node_pages.max(initial=0)) + 2
    slots = torch.full((pages * layout.page_size, *tokens.shape[1:]), torch.nan, dtype=tokens.dtype)
    slots[used_slots(layout)] = tokens
    return slots.view(pages, layout.page_size, *tokens.shape[1:])


def random_layout(
    rng: np.random.Generator, *, page_size: int, decode: bool = False
) -> AttentionLayout:
    """Several trees, with empty, one-token and branching nodes, and segments of all kinds."""
    count = int(rng.integers(1, 9))
    parents = [int(rng.integers(-1, n)) if rng.random() < 0.8 else -1 for n in range(count)]
    nodes: list[Node] = []
    for node, parent in enumerate(parents):
        tokens = int(rng.integers(0, 90)) if rng.random() < 0.8 else int(rng.integers(0, 2))
        if node in parents:
            tokens = tokens // page_size * page_size
        nodes.append(Node(parent=parent, tokens=tokens))
    segments: list[Segment] = []
    for _ in range(int(rng.integers(1, 12))):
        rows = 1 if decode else int(rng.choice([0, 1, 2, 5, 8, 20, 40]))
        is_item = not decode and bool(rng.random() < 0.6)
        segments.append(Segment(node=int(rng.integers(-1, count)), rows=rows, is_item=is_item))
    shuffle = rng if rng.random() < 0.5 else None
    return make_layout(nodes, segments, page_size=page_size, shuffle=shuffle)


def random_one_prefix_layout(rng: np.random.Generator, *, page_size: int) -> AttentionLayout:
    """Trees that are one prefix each: a chunk of the context, and items of very uneven lengths."""
    nodes: list[Node] = []
    segments: list[Segment] = []
    for node in range(int(rng.integers(1, 4))):
        tokens = int(rng.integers(1, 90))
        nodes.append(Node(tokens=tokens))
        if rng.random() < 0.6:
            segments.append(Segment(node=node, rows=int(rng.integers(1, tokens + 1))))
        lengths = rng.choice([0, 1, 2, 7, 30, 200], size=int(rng.integers(0, 9)))
        segments += [Segment(node=node, rows=int(rows), is_item=True) for rows in lengths]
    order = np.argsort(rng.random(len(segments)))
    shuffle = rng if rng.random() < 0.5 else None
    mixed = [segments[int(i)] for i in order]
    return make_layout(nodes, mixed, page_size=page_size, shuffle=shuffle)
