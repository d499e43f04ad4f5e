"""Layouts as batches of FlashInfer: which tokens are copied, and every request's block table."""

import numpy as np

from stemserve.kernels.flashinfer_paths.prefill_batch import (
    BatchTables,
    PrefillBatch,
    seeing_requests,
)
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.token_sources import (
    EMPTY,
    chain_levels,
    node_page_counts,
    node_sources,
    row_sources,
    runs,
    token_slots,
)


def row_segments(layout: AttentionLayout) -> Int32:
    return np.flatnonzero(layout.segment_rows > 0).astype(np.int32)


def pool_tables(layout: AttentionLayout, *, causal: bool) -> BatchTables:
    """Stored segments over the pool's own pages, whoever else reads them."""
    segments = row_segments(layout)
    levels = chain_levels(layout, layout.segment_node[segments])
    counts = np.where(levels >= 0, node_page_counts(layout)[levels], 0)
    pages = layout.node_pages[runs(layout.node_page_indptr[levels], counts)]
    rows, tokens = seeing_requests(layout.segment_rows[segments], layout.chain_tokens[segments])
    return BatchTables(batch=_batch(layout, rows, tokens, pages, causal=causal))


def naive_tables(layout: AttentionLayout) -> BatchTables:
    """Every segment over a copy of all that it sees."""
    segments = row_segments(layout)
    levels = chain_levels(layout, layout.segment_node[segments])
    nodes = np.arange(layout.num_nodes, dtype=np.int32)
    slots = token_slots(layout, nodes)
    node_start = np.cumsum(layout.node_tokens) - layout.node_tokens
    own = np.where(layout.segment_is_item[segments], layout.segment_rows[segments], 0)
    chain_counts = np.where(levels >= 0, layout.node_tokens[levels], 0)
    # The own rows of a segment are one more run, after the slots of all nodes.
    starts = np.column_stack([node_start[levels], len(slots) + layout.segment_indptr[segments]])
    counts = np.column_stack([chain_counts, own])
    known = np.concatenate([slots, row_sources(int32([0]), int32([layout.num_rows]))])
    sources = known[runs(int32(starts), int32(counts))]
    return BatchTables(batch=naive_batch(layout), sources=sources)


def naive_outline(layout: AttentionLayout) -> BatchTables:
    """As `naive_tables`, without the sources."""
    batch = naive_batch(layout)
    return BatchTables(batch=batch, sources=np.zeros(int(batch.kv_tokens.sum()), np.int32))


def naive_batch(layout: AttentionLayout) -> PrefillBatch:
    segments = row_segments(layout)
    asked = layout.segment_rows[segments]
    own = asked * layout.segment_is_item[segments]
    rows, tokens = seeing_requests(asked, layout.chain_tokens[segments] + own)
    return _batch(layout, rows, tokens, None)


def ragged_tables(layout: AttentionLayout, *, copied: bool = False) -> BatchTables:
    """Block tables that share the pages of the prefixes; a copy of them if there are items.

    `copied`: always a copy.

    A page that an item's chain ends in is copied for each such item, with the item's rows after
    it: own tokens begin inside a page.
    """
    segments = row_segments(layout)
    is_item = layout.segment_is_item[segments]
    if not copied and not is_item.any():
        return pool_tables(layout, causal=True)
    nodes, size = layout.segment_node[segments], layout.page_size
    levels = chain_levels(layout, nodes)
    used = np.unique(levels[levels >= 0])
    node_counts = node_page_counts(layout)
    first_page = np.zeros(layout.num_nodes + 1, np.int32)
    first_page[used] = np.cumsum(node_counts[used]) - node_counts[used]
    prefix = node_sources(layout, used)
    tails = layout.chain_tokens[segments] % size * is_item
    own_tokens = tails + layout.segment_rows[segments] * is_item
    own_pages = -(-own_tokens // size)
    own_first = len(prefix) // size + np.cumsum(own_pages) - own_pages
    counts = np.where(levels >= 0, node_counts[levels], 0)
    if counts.shape[1]:
        counts[:, -1] -= tails > 0
    rows, tokens = seeing_requests(
        layout.segment_rows[segments],
        layout.chain_tokens[segments] + layout.segment_rows[segments] * is_item,
    )
    starts = np.column_stack([first_page[levels], own_first])
    pages = runs(int32(starts), int32(np.column_stack([counts, own_pages])))
    own = _own_sources(layout, segments, tails, own_pages)
    return BatchTables(
        batch=_batch(layout, rows, tokens, pages), sources=np.concatenate([prefix, own])
    )


def _own_sources(layout: AttentionLayout, segments: Int32, tails: Int32, own_pages: Int32) -> Int32:
    """For each item the last tokens of its chain that fill no page, and its rows."""
    size = layout.page_size
    sources = np.full(int(own_pages.sum()) * size, EMPTY, np.int32)
    start = int32(np.cumsum(own_pages) - own_pages) * size
    tailed = np.flatnonzero(tails)
    nodes = layout.segment_node[segments[tailed]]
    last = layout.node_pages[layout.node_page_indptr[nodes] + layout.node_tokens[nodes] // size]
    sources[runs(start[tailed], tails[tailed])] = runs(last * size, tails[tailed])
    rows = np.where(layout.segment_is_item[segments], layout.segment_rows[segments], 0)
    sources[runs(start + tails, rows)] = row_sources(layout.segment_indptr[segments], rows)
    return sources


def _batch(
    layout: AttentionLayout,
    rows: Int32,
    tokens: Int32,
    pages: Int32 | None,
    *,
    causal: bool = True,
) -> PrefillBatch:
    return PrefillBatch(
        rows=int32(rows),
        kv_tokens=int32(tokens),
        pages=None if pages is None else int32(pages),
        page_size=layout.page_size,
        causal=causal,
    )
