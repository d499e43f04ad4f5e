"""Logical requests: the segments of one tree as a single sequence of rows."""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalRequest:
    """All segments with rows below one root, stored ones first; -1 is the root of all without."""

    root: int
    segments: Int32
    row_start: int  # in the order of the requests


def logical_requests(layout: AttentionLayout) -> list[LogicalRequest]:
    roots = np.arange(layout.num_nodes + 1, dtype=np.int32)
    roots[-1] = -1
    for node, parent in enumerate(layout.node_parent):
        if parent >= 0:
            roots[node] = roots[parent]
    segments = np.flatnonzero(layout.segment_rows > 0).astype(np.int32)
    segment_root = roots[layout.segment_node[segments]]
    requests: list[LogicalRequest] = []
    row_start = 0
    for root in np.unique(segment_root).tolist():
        members = segments[segment_root == root]
        members = members[np.argsort(layout.segment_is_item[members], kind="stable")]
        requests.append(LogicalRequest(root=root, segments=members, row_start=row_start))
        row_start += int(layout.segment_rows[members].sum())
    return requests


def segment_row_list(layout: AttentionLayout, segments: Int32) -> Int32:
    """The layout's rows of some segments, in their order."""
    counts = layout.segment_rows[segments]
    before = np.cumsum(counts) - counts
    place = np.arange(int(counts.sum())) - np.repeat(before, counts)
    return int32(np.repeat(layout.segment_indptr[segments], counts) + place)


def request_row_order(layout: AttentionLayout, requests: list[LogicalRequest]) -> Int32 | None:
    """The layout's rows in the order of the requests, or None if that is the layout's order."""
    lists = [segment_row_list(layout, request.segments) for request in requests]
    order = np.concatenate([np.empty(0, np.int32), *lists])
    return None if np.array_equal(order, np.arange(len(order))) else order
