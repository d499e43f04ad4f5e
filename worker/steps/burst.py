"""What a burst is: decode steps in a row, whose forest grows in its leaves only."""

from dataclasses import replace

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_int32
from stemserve.worker.steps.checks import check_range, check_unique

NOBODY = np.empty(0, np.int32)


def decode_row_steps(blob: bytes, *, repeat: int, rows: int) -> Int32:  # [rows]; []: no burst
    if not blob and repeat == 1:
        return NOBODY
    row_steps = decode_int32("row_steps", blob)
    expected = rows if repeat > 1 else 0
    if len(row_steps) != expected:
        raise BadPlan(f"row_steps has {len(row_steps)} numbers; the step needs {expected}")
    check_range("row_steps", row_steps, 1, repeat + 1)
    return row_steps


def tokens_ahead(row_steps: Int32, sub_step: int) -> Int32:  # [rows]
    """Tokens that each row's chain has more than in sub-step 0."""
    return np.minimum(row_steps - 1, np.int32(sub_step))


def layout_ahead(layout: AttentionLayout, ahead: Int32) -> AttentionLayout:
    """The layout of a sub-step: the leaves are `ahead` [segments] tokens longer than in sub-step 0.

    `layout` is that of sub-step 0 with the pages of the last; only those that are filled are left.
    """
    tokens = layout.node_tokens.copy()
    tokens[layout.segment_node] += ahead
    filled = -(-tokens // layout.page_size)
    if int(filled.sum()) == len(layout.node_pages):
        return replace(layout, node_tokens=tokens)
    indptr = layout.node_page_indptr
    counts = np.diff(indptr)
    within = np.arange(len(layout.node_pages)) - np.repeat(indptr[:-1], counts)
    return replace(
        layout,
        node_tokens=tokens,
        node_page_indptr=np.append(0, np.cumsum(filled)).astype(np.int32),
        node_pages=layout.node_pages[within < np.repeat(filled, counts)],
    )


def longest_layout(
    layout: AttentionLayout,  # of sub-step 0, with the pages of the last
    segment_kind: Int32,  # [rows]
    row_steps: Int32,  # [rows] sub-steps for which each counts
) -> AttentionLayout:
    """The layout of the last sub-step. Raises BadPlan unless every segment is a row below a leaf
    of its own."""
    if not len(layout.segment_node) == len(segment_kind) == len(row_steps):
        raise BadPlan("segment_node: a burst has one segment a row")
    if (segment_kind != worker_pb2.SEGMENT_KIND_DECODE).any():
        raise BadPlan("segment_kind: a burst has decode segments only")
    check_range("segment_node", layout.segment_node, 0, layout.num_nodes)
    check_unique("segment_node of a burst", layout.segment_node)
    if np.isin(layout.segment_node, layout.node_parent).any():
        raise BadPlan("segment_node: the segments of a burst end in leaves")
    if len(layout.node_tokens) != layout.num_nodes:
        raise BadPlan(f"{layout.num_nodes} node_parent but {len(layout.node_tokens)} node_tokens")
    if (layout.node_tokens < 1).any():
        raise BadPlan("node_tokens: a node must hold at least one token")
    tokens = layout.node_tokens.copy()
    tokens[layout.segment_node] += row_steps - 1
    return replace(layout, node_tokens=tokens)


def check_burst_rows(
    layout: AttentionLayout,  # of sub-step 0, with the pages of the last
    positions: Int32,  # [rows]
    kv_slots: Int32,  # [repeat * rows]
    row_steps: Int32,  # [rows]
) -> None:
    """Each row stores its tokens in its leaf, one behind the other, while it counts."""
    expected = layout.chain_tokens - 1
    if (positions != expected).any():
        row = int(np.flatnonzero(positions != expected)[0])
        raise BadPlan(
            f"positions: row {row} has position {positions[row]}; "
            f"by its segment's chain it is token {expected[row]}"
        )
    leaf = layout.segment_node
    sub_step = np.arange(len(kv_slots) // len(positions), dtype=np.int32)[:, None]
    at = layout.node_tokens[leaf] - 1 + np.minimum(sub_step, row_steps - 1)
    page, offset = np.divmod(at, layout.page_size)
    slots = layout.node_pages[layout.node_page_indptr[leaf] + page] * layout.page_size + offset
    slots = np.where(sub_step < row_steps, slots, -1).ravel()
    wrong = np.flatnonzero(kv_slots != slots)
    if len(wrong):
        sub_step_of, row = divmod(int(wrong[0]), len(positions))
        raise BadPlan(
            f"kv_slots: row {row} goes to slot {kv_slots[wrong[0]]} in sub-step {sub_step_of}; "
            f"by its chain that is {slots[wrong[0]]}"
        )
