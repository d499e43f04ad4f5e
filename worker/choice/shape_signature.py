"""What the choice of a kernel depends on: candidates of equal signature get one choice."""

import math
from typing import assert_never

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.kernels.strategy import Phase
from stemserve.worker.steps.layout import Candidate, part_of

Signature = tuple[object, ...]

# Larger shapes never come again exactly, and weighing one takes a tenth of a millisecond a segment.
EXACT_SEGMENTS = 32
BUCKETS_AN_OCTAVE = 4


def signature(layout: AttentionLayout, candidate: Candidate) -> Signature:
    kind = (candidate.phase, candidate.forced)
    segments = candidate.segments
    if len(segments) == 1:
        segment = int(segments[0])
        rows, chain = int(layout.segment_rows[segment]), int(layout.chain_tokens[segment])
        return (*kind, bool(layout.segment_is_item[segment]), _bucket(rows), _bucket(chain))
    part = part_of(layout, candidate)
    if len(segments) <= EXACT_SEGMENTS:
        return (*kind, *_exact(part, candidate.phase))
    return (*kind, *_rough(part))


def _exact(layout: AttentionLayout, phase: Phase) -> Signature:
    arrays = (
        layout.segment_rows,
        layout.segment_is_item,
        layout.segment_node,
        layout.node_parent,
        _sizes(layout, phase),
    )
    return tuple(array.tobytes() for array in arrays)


def _sizes(layout: AttentionLayout, phase: Phase) -> Int32:
    match phase:
        case Phase.PREFILL:
            return layout.node_tokens
        case Phase.DECODE:
            # In pages: a decode group grows by a token a step and need not be weighed each time.
            return np.diff(layout.node_page_indptr)
        case _:
            assert_never(phase)


def _rough(layout: AttentionLayout) -> Signature:
    """How many, how long, how deep, and how much is shared."""
    sizes = (
        layout.num_segments,
        layout.num_nodes,
        layout.num_rows,
        int(layout.segment_rows.max()),
        int(layout.segment_is_item.sum()),
        int(layout.node_tokens.sum(dtype=np.int64)),
        int(layout.chain_tokens.sum(dtype=np.int64)),
    )
    return (_depth(layout), *(_bucket(size) for size in sizes))


def _depth(layout: AttentionLayout) -> int:
    if layout.num_nodes == 1:
        return int((layout.segment_node == 0).any())
    depth, nodes = 0, layout.segment_node
    while len(nodes := np.unique(nodes[nodes >= 0])):
        depth, nodes = depth + 1, layout.node_parent[nodes]
    return depth


def _bucket(size: int) -> int:
    return round(BUCKETS_AN_OCTAVE * math.log2(size)) if size else -1
