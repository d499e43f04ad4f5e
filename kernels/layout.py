"""What one attention group reads: its query rows, and the forest of stored KV above them.

Everything here is host data (numpy), made once a step and shared by all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Heads of one attention layer."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q . k

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Query rows in segments; each segment hangs below one node of a forest of stored KV.

    A node's tokens lie in its pages in order, from slot 0 of its first page. The stored KV of a
    segment is its chain: the tokens of all nodes from the root down to `segment_node`.

    * A stored segment's rows are the last tokens of its chain (their K/V is in the pages before
      attention runs, and in `LayerKV.k_rows` / `v_rows` too): row i of q_len rows at chain length n
      sees the first n - q_len + 1 + i.
    * An item segment's rows are not in the chain: row i sees all of the chain and the segment's
      rows 0..i, whose K/V are in `LayerKV.k_rows` / `v_rows`.

    Rows are numbered inside the group, 0 .. segment_indptr[-1] - 1.
    """

    page_size: int
    node_parent: Int32  # [nodes], -1 for a root; parents come before children
    node_page_indptr: Int32  # [nodes + 1]
    node_pages: Int32  # [node_page_indptr[-1]] page numbers
    node_tokens: Int32  # [nodes]; a multiple of page_size unless the node has no child
    segment_indptr: Int32  # [segments + 1] rows
    segment_node: Int32  # [segments], -1: no stored KV
    segment_is_item: NDArray[np.bool_]  # [segments]

    @property
    def num_nodes(self) -> int:
        return len(self.node_parent)

    @property
    def num_segments(self) -> int:
        return len(self.segment_node)

    @property
    def num_rows(self) -> int:
        return int(self.segment_indptr[-1])

    @cached_property
    def segment_rows(self) -> Int32:  # [segments]
        return np.diff(self.segment_indptr)

    @cached_property
    def node_start(self) -> Int32:  # [nodes] tokens of the chain before the node
        # Of node -1 too, in the last place; each round doubles the ancestors that are counted.
        start: Int32 = np.append(self.node_tokens, np.int32(0))[np.append(self.node_parent, -1)]
        above = np.append(self.node_parent, np.int32(-1))
        while above.max() >= 0:
            start += start[above]
            above = above[above]
        return start[:-1]

    @cached_property
    def chain_tokens(self) -> Int32:  # [segments] length of each segment's chain
        ends = np.append(self.node_start + self.node_tokens, np.int32(0))  # node -1 reads the 0
        return ends[self.segment_node].astype(np.int32)

    def chain(self, node: int) -> list[int]:
        """Nodes from the root down to `node`; empty for -1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = int(self.node_parent[node])
        return nodes[::-1]

    def pages(self, node: int) -> Int32:
        return self.node_pages[self.node_page_indptr[node] : self.node_page_indptr[node + 1]]

    def chain_pages(self, node: int) -> Int32:
        """The block table of a segment under `node`."""
        chain = self.chain(node)
        return np.concatenate([self.pages(n) for n in chain]) if chain else np.empty(0, np.int32)


def int32(values: Sequence[int] | NDArray[np.integer]) -> Int32:
    return np.asarray(values, dtype=np.int32)
