"""The attention groups of a step: which rows are computed together, and the forest above them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.kernels.strategy import Phase
from stemserve.worker.steps.step import DECODE, Step

FORCED_KEYS = 1 << 8  # more than there are kernels


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Segments that share a choice of kernel: one tree of the forest, or all decode rows."""

    phase: Phase
    forced: int  # Kernel of worker.proto; 0: none
    segments: NDArray[np.intp]  # ascending
    is_whole_step: bool = False  # known: all segments, which read every node


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Rows of the step that one strategy computes."""

    phase: Phase
    layout: AttentionLayout
    rows: slice | NDArray[np.intp]  # of the step; a slice where they are contiguous

    @cached_property
    def kv_tokens_one_by_one(self) -> int:
        """KV tokens that one read a request would take: its chain, and an item's own rows.

        A context's own rows do not count where an item ends the same chain: one by one, the item's
        request would run them itself.
        """
        layout = self.layout
        own = np.where(layout.segment_is_item, layout.segment_rows, 0)
        item_nodes = layout.segment_node[layout.segment_is_item]
        alone = layout.segment_is_item | ~np.isin(layout.segment_node, item_nodes)
        return int((layout.chain_tokens + own)[alone].sum(dtype=np.int64))


def candidates(step: Step) -> Iterator[Candidate]:
    """Decode segments are one candidate, the others one a tree; a forced kernel divides further."""
    if step.is_one_tree:
        forced = int(step.segment_kernel[0])
        segments = np.arange(step.layout.num_segments)
        yield Candidate(phase=Phase.PREFILL, forced=forced, segments=segments, is_whole_step=True)
        return
    decode = step.segment_kind == DECODE
    # Items without a context have no tree; they count as one more, -1.
    tree = np.where(decode, -2, _roots(step.layout)[step.layout.segment_node])
    keys = tree.astype(np.int64) * FORCED_KEYS + step.segment_kernel
    order = np.argsort(keys, kind="stable")
    keys_in_order = keys[order]
    ends = (keys_in_order[1:] != keys_in_order[:-1]).nonzero()[0] + 1
    for segments in np.split(order, ends):
        root, forced = divmod(int(keys[segments[0]]), FORCED_KEYS)
        phase = Phase.DECODE if root == -2 else Phase.PREFILL
        yield Candidate(phase=phase, forced=forced, segments=segments)


def _roots(layout: AttentionLayout) -> Int32:
    """The root above each node, and -1 last, which is what node -1 reads."""
    nodes = np.arange(layout.num_nodes, dtype=np.int32)
    # Depth first: the latest root before a node is the node's.
    root = np.maximum.accumulate(np.where(layout.node_parent < 0, nodes, 0))
    return np.append(root, np.int32(-1))


def part_of(layout: AttentionLayout, candidate: Candidate) -> AttentionLayout:
    """What the candidate is of a step's layout."""
    return layout if candidate.is_whole_step else sub_layout(layout, candidate.segments)


def sub_layout(
    layout: AttentionLayout,
    segments: NDArray[np.intp],  # [segments] numbers, ascending
) -> AttentionLayout:
    """The segments and the nodes above them, numbered anew."""
    nodes = _nodes_above(layout, layout.segment_node[segments])
    if len(segments) == layout.num_segments and len(nodes) == layout.num_nodes:
        return layout
    number = np.full(layout.num_nodes + 1, -1, np.int32)  # the last: node -1
    number[nodes] = np.arange(len(nodes), dtype=np.int32)
    page_counts = np.diff(layout.node_page_indptr)[nodes] if len(nodes) else np.zeros(0, np.int32)
    first_pages = layout.node_page_indptr[nodes]
    return AttentionLayout(
        page_size=layout.page_size,
        node_parent=number[layout.node_parent[nodes]],
        node_page_indptr=_indptr(page_counts),
        node_pages=layout.node_pages[_ranges(first_pages, page_counts)],
        node_tokens=layout.node_tokens[nodes],
        segment_indptr=_indptr(layout.segment_rows[segments]),
        segment_node=number[layout.segment_node[segments]],
        segment_is_item=layout.segment_is_item[segments],
    )


def group(
    step: Step,
    phase: Phase,
    segments: NDArray[np.intp],  # [segments] numbers, ascending
) -> AttentionGroup:
    """Rows that lie together are a slice of the step's, so that nobody copies them."""
    layout = step.layout
    if step.is_one_tree:
        return AttentionGroup(phase=phase, layout=layout, rows=slice(0, step.num_rows))
    first, last = int(segments[0]), int(segments[-1])
    rows: slice | NDArray[np.intp]
    if last - first + 1 == len(segments):
        rows = slice(int(layout.segment_indptr[first]), int(layout.segment_indptr[last + 1]))
    else:
        rows = _ranges(layout.segment_indptr[segments], layout.segment_rows[segments])
    return AttentionGroup(phase=phase, layout=sub_layout(layout, segments), rows=rows)


def _nodes_above(layout: AttentionLayout, nodes: Int32) -> NDArray[np.intp]:
    """The nodes and all their ancestors, ascending."""
    used = np.zeros(layout.num_nodes, np.bool_)
    frontier = np.unique(nodes[nodes >= 0])
    while len(frontier):
        used[frontier] = True
        parents = layout.node_parent[frontier]
        frontier = np.unique(parents[parents >= 0])
        frontier = frontier[~used[frontier]]
    return np.flatnonzero(used)


def _indptr(counts: NDArray[np.integer]) -> Int32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.intp]:
    """starts[0], starts[0] + 1, ... counts[0] numbers, then the same for the next."""
    ends = np.cumsum(counts, dtype=np.intp)
    total = int(ends[-1]) if len(ends) else 0
    shifts: NDArray[np.intp] = np.repeat(starts - ends + counts, counts)
    return np.arange(total) + shifts
