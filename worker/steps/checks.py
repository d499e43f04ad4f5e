"""What must hold in a step before anything of it may run.

The checks are vectorised: a step of thousands of rows is checked in well under a millisecond.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.worker.blobs import BadPlan

# Each call of these makes a list.
SEGMENT_KINDS = len(worker_pb2.SegmentKind.values())
KERNELS = len(inference_pb2.Kernel.values())
SHOWN_VALUES = 3  # how many wrong values a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What the worker can hold and the model can read."""

    vocab_size: int
    context_tokens: int
    page_size: int
    kv_pages: int
    sampler_slots: int
    max_step_tokens: int
    has_lm_head: bool
    classes: int  # 0: no classification head
    max_burst_steps: int = 8


def check_range(name: str, values: NDArray[np.integer], low: int, end: int) -> None:
    """Raises BadPlan unless low <= value < end for each."""
    if values.size and (values.min() < low or values.max() >= end):
        wrong = values[(values < low) | (values >= end)]
        shown = ", ".join(str(v) for v in wrong[:SHOWN_VALUES])
        raise BadPlan(f"{name} must be in {low}..{end - 1}; found {shown}")


def check_unique(name: str, values: Int32) -> None:
    """Raises BadPlan where two are equal; values that ascend, as most do, take one pass."""
    if len(values) < 2 or (values[1:] > values[:-1]).all():
        return
    ordered = np.sort(values)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise BadPlan(f"{name} must differ; {twice[0]} is there twice")


def check_indptr(name: str, indptr: Int32, slices: int, total: int) -> None:
    """Raises BadPlan unless it has `slices` + 1 offsets that rise from 0 to `total`."""
    if len(indptr) != slices + 1:
        raise BadPlan(f"{name} has {len(indptr)} numbers; {slices} slices need {slices + 1}")
    if indptr[0] != 0 or indptr[-1] != total or (indptr[1:] < indptr[:-1]).any():
        raise BadPlan(f"{name} must rise from 0 to {total}")


def check_forest(layout: AttentionLayout, kv_pages: int) -> None:
    """Of a cache of so many pages. Raises BadPlan."""
    nodes = layout.num_nodes
    if len(layout.node_tokens) != nodes:
        raise BadPlan(f"{nodes} node_parent but {len(layout.node_tokens)} node_tokens")
    if nodes or len(layout.node_page_indptr):
        check_indptr("node_page_indptr", layout.node_page_indptr, nodes, len(layout.node_pages))
    elif len(layout.node_pages):
        raise BadPlan("node_pages without nodes")
    check_range("node_pages", layout.node_pages, 0, kv_pages)
    check_range("node_parent", layout.node_parent, -1, max(nodes, 1))
    _check_depth_first(layout.node_parent)
    _check_node_tokens(layout)


def _check_depth_first(parent: Int32) -> None:
    """A node's subtree is a run of nodes that starts with it."""
    if (parent >= np.arange(len(parent))).any():
        raise BadPlan("node_parent: a parent must come before its children")
    size = [1] * len(parent)
    parents: list[int] = parent.tolist()
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    end = np.arange(len(parent)) + np.asarray(size, np.int64)
    inner = parent >= 0
    if (end[inner] > end[parent[inner]]).any():
        raise BadPlan("node_parent: nodes must be in depth-first order")


def _check_node_tokens(layout: AttentionLayout) -> None:
    if not layout.num_nodes:
        return
    pages = np.diff(layout.node_page_indptr).astype(np.int64)
    tokens = layout.node_tokens.astype(np.int64)
    if ((tokens <= (pages - 1) * layout.page_size) | (tokens > pages * layout.page_size)).any():
        raise BadPlan(
            "node_tokens: a node's tokens must reach into its last page and fit its pages"
        )
    if (tokens < 1).any():
        raise BadPlan("node_tokens: a node must hold at least one token")
    parents = layout.node_parent[layout.node_parent >= 0]
    if (tokens[parents] % layout.page_size).any():
        raise BadPlan("node_tokens: a node with children must end at the end of a page")


def check_segments(
    layout: AttentionLayout,
    kind: Int32,  # [segments] SegmentKind
    kernel: Int32,  # [segments] Kernel; 0: the worker chooses
) -> None:
    """Raises BadPlan."""
    segments = layout.num_segments
    if len(kind) != segments or len(kernel) != segments:
        raise BadPlan(
            f"{segments} segment_node, {len(kind)} segment_kind "
            f"and {len(kernel)} segment_kernel differ"
        )
    check_range("segment_node", layout.segment_node, -1, layout.num_nodes)
    check_range("segment_kind", kind, worker_pb2.SEGMENT_KIND_PREFILL, SEGMENT_KINDS)
    check_range("segment_kernel", kernel, 0, KERNELS)
    stored = ~layout.segment_is_item
    if (layout.segment_node[stored] < 0).any():
        raise BadPlan("segment_node: a prefill or decode segment needs a node")
    if (layout.segment_rows[kind == worker_pb2.SEGMENT_KIND_DECODE] != 1).any():
        raise BadPlan("segment_indptr: a decode segment has exactly one row")
    if (layout.segment_rows[stored] > layout.chain_tokens[stored]).any():
        raise BadPlan("segment_indptr: a stored segment has more rows than its chain has tokens")


def check_layout_rows(
    layout: AttentionLayout,
    positions: Int32,  # [rows]
    kv_slots: Int32,  # [rows] -1: not stored
) -> None:
    """Positions follow from the chains, and stored rows go where their chains say.

    Raises BadPlan.
    """
    rows = layout.segment_rows
    first = layout.chain_tokens - np.where(layout.segment_is_item, np.int32(0), rows)
    shifts = (first - layout.segment_indptr[:-1]).repeat(rows)
    expected = shifts + np.arange(len(positions), dtype=np.int32)
    if (differs := positions != expected).any():
        row = int(differs.argmax())
        raise BadPlan(
            f"positions: row {row} has position {positions[row]}; "
            f"by its segment's chain it is token {expected[row]}"
        )
    is_stored = kv_slots != -1
    if (is_stored & layout.segment_is_item.repeat(rows)).any():
        raise BadPlan("kv_slots: an item's rows are not stored")
    stored = is_stored.nonzero()[0]
    row_segment = np.arange(layout.num_segments).repeat(rows)
    wrong = kv_slots[stored] != _slots_of(layout, row_segment[stored], positions[stored])
    if wrong.any():
        row = int(stored[np.flatnonzero(wrong)[0]])
        raise BadPlan(f"kv_slots: row {row} goes to slot {kv_slots[row]}, not to its chain's page")


def _slots_of(layout: AttentionLayout, row_segment: NDArray[np.intp], positions: Int32) -> Int32:
    """Where the chain of each row's segment keeps the token at the row's position."""
    node = layout.segment_node[row_segment]
    start = layout.node_start
    while (above := positions < start[node]).any():
        node = np.where(above, layout.node_parent[node], node)
    inside = positions - start[node]
    page = inside // layout.page_size
    pages = layout.node_pages[layout.node_page_indptr[node] + page]
    slots: Int32 = (pages - page) * layout.page_size + inside
    return slots
