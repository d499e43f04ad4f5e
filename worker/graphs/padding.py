"""Layouts of decode steps with as many rows as a captured graph has."""

from dataclasses import replace

import numpy as np

from stemserve.kernels.layout import AttentionLayout


def padded(
    layout: AttentionLayout,  # of segments of one row
    rows: int,
    spare_page: int,
) -> AttentionLayout:
    """With rows behind its own that see one token of a page that no sequence has."""
    missing = rows - layout.num_segments
    if not missing:
        return layout
    node = layout.num_nodes
    return replace(
        layout,
        node_parent=np.append(layout.node_parent, np.int32(-1)),
        node_page_indptr=np.append(layout.node_page_indptr, np.int32(len(layout.node_pages) + 1)),
        node_pages=np.append(layout.node_pages, np.int32(spare_page)),
        node_tokens=np.append(layout.node_tokens, np.int32(1)),
        segment_indptr=np.arange(rows + 1, dtype=np.int32),
        segment_node=np.concatenate((layout.segment_node, np.full(missing, node, np.int32))),
        segment_is_item=np.zeros(rows, np.bool_),
    )
