"""Where the tokens of a gathered copy come from, and runs of numbers as one array."""

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32, int32

EMPTY = -(1 << 31)  # a token that holds zeros


def runs(starts: Int32, counts: Int32) -> Int32:  # [counts.sum()]
    """start .. start + count - 1 of each run, one after the other; arrays of any one shape."""
    start, count = starts.ravel(), counts.ravel()
    ends = count.cumsum(dtype=np.int32)
    numbers = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    numbers += np.repeat(start - ends + count, count).astype(np.int32, copy=False)
    return numbers


def indptr(counts: Int32) -> Int32:  # [n + 1]
    ends = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=ends[1:])
    return ends


def row_sources(
    first_rows: Int32,  # [runs]
    rows: Int32,  # [runs] of each
) -> Int32:  # [rows.sum()]
    """The step's own rows from each first one on: row i is -1 - i."""
    return int32(-1 - runs(first_rows, rows))


def chain_levels(
    layout: AttentionLayout,
    nodes: Int32,  # [nodes] any of the layout's; -1: an empty chain
) -> Int32:  # [nodes, depth], root first
    """The chain of each node, filled up with -1 in front."""
    levels: list[Int32] = []
    parents = np.append(layout.node_parent, np.int32(-1))  # node -1 reads the last
    level = nodes
    while (level >= 0).any():
        levels.append(level)
        level = parents[level]
    return np.stack(levels[::-1], axis=1) if levels else np.empty((len(nodes), 0), np.int32)


def node_page_counts(layout: AttentionLayout) -> Int32:  # [nodes] pages that hold tokens
    return int32(-(-layout.node_tokens // layout.page_size))


def node_sources(
    layout: AttentionLayout,
    nodes: Int32,  # [nodes] any of the layout's
) -> Int32:  # [pages of the nodes * page_size] slots
    """The tokens of some nodes, each from a page boundary on: pages are filled up with EMPTY."""
    size, counts = layout.page_size, node_page_counts(layout)[nodes]
    pages = layout.node_pages[runs(layout.node_page_indptr[nodes], counts)]
    slots = pages[:, None] * size + np.arange(size, dtype=np.int32)
    held = layout.node_tokens[nodes]
    place = runs(np.zeros_like(counts), counts)  # of a page in its node
    left = np.repeat(held, counts) - place * size
    return int32(np.where(np.arange(size) < left[:, None], slots, EMPTY).ravel())


def token_slots(layout: AttentionLayout, nodes: Int32) -> Int32:  # [tokens of the nodes]
    """The tokens of some nodes without gaps."""
    sources = node_sources(layout, nodes)
    return int32(sources[sources != EMPTY])
