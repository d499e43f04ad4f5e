"""Items as stored segments, whose own rows lie in pages of a scratch.

An item's scratch pages go on where the full pages of its chain end: first the tokens of the chain's
partial last page, then its own. So each of its rows meets its tokens at the places that they would
have if the item were stored.
"""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.codec.tiles import OWN_ROWS
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.token_sources import EMPTY, indptr, row_sources, runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedItems:
    layout: AttentionLayout  # the same rows, all of stored segments
    sources: Int32  # [tokens of the scratch pages], see token_sources.py


def paged_items(layout: AttentionLayout) -> PagedItems:
    """Numbers of scratch pages are those that the tree kernel has for a step's own rows."""
    items = np.flatnonzero(layout.segment_is_item & (layout.segment_rows > 0))
    if not len(items):
        return PagedItems(layout=_all_stored(layout), sources=np.empty(0, np.int32))
    size, nodes = layout.page_size, layout.num_nodes
    node, rows = layout.segment_node[items], layout.segment_rows[items]
    tokens = np.append(layout.node_tokens, np.int32(0))  # node -1 reads the last
    tail = tokens[node] % size
    pages = int32(-(-(tail + rows) // size))
    first = indptr(pages) * size  # of each item's tokens in the scratch
    sources = np.full(first[-1], EMPTY, np.int32)
    sources[runs(first[:-1], tail)] = runs(_last_page(layout, node) * size, tail)
    sources[runs(first[:-1] + tail, rows)] = row_sources(layout.segment_indptr[items], rows)
    cut = np.unique(node[tail > 0])
    segment_node = layout.segment_node.copy()
    at_cut = np.flatnonzero(np.isin(segment_node, cut) & ~layout.segment_is_item)
    segment_node[at_cut] = nodes + cut.searchsorted(segment_node[at_cut])
    segment_node[items] = nodes + len(cut) + np.arange(len(items))
    node_tokens = layout.node_tokens.copy()
    node_tokens[cut] -= tokens[cut] % size
    page_counts = np.concatenate([np.diff(layout.node_page_indptr), np.ones_like(cut), pages])
    scratch = np.arange(len(sources) // size, dtype=np.int32) * np.int32(size) | OWN_ROWS
    stored = AttentionLayout(
        page_size=size,
        # The cut nodes' tails, for stored segments that end there, and then the items.
        node_parent=int32(np.concatenate([layout.node_parent, cut, node])),
        node_page_indptr=indptr(int32(page_counts)),
        node_pages=int32(np.concatenate([layout.node_pages, _last_page(layout, cut), scratch])),
        node_tokens=int32(np.concatenate([node_tokens, tokens[cut] % size, tail + rows])),
        segment_indptr=layout.segment_indptr,
        segment_node=int32(segment_node),
        segment_is_item=np.zeros(layout.num_segments, np.bool_),
    )
    return PagedItems(layout=stored, sources=sources)


def _all_stored(layout: AttentionLayout) -> AttentionLayout:
    """Items without rows are nothing to any strategy."""
    if not layout.segment_is_item.any():
        return layout
    return AttentionLayout(
        page_size=layout.page_size,
        node_parent=layout.node_parent,
        node_page_indptr=layout.node_page_indptr,
        node_pages=layout.node_pages,
        node_tokens=layout.node_tokens,
        segment_indptr=layout.segment_indptr,
        segment_node=layout.segment_node,
        segment_is_item=np.zeros(layout.num_segments, np.bool_),
    )


def _last_page(layout: AttentionLayout, node: Int32) -> Int32:
    """The page of each node's last token; any page for a node without."""
    used = -(-layout.node_tokens // layout.page_size)
    last = np.append(layout.node_page_indptr[:-1] + np.maximum(used - 1, 0), np.int32(-1))
    pages = np.append(layout.node_pages, np.int32(0))
    return int32(pages[last[node]])
