"""The forest of a layout as kernels read it: rows in depth-first order, one range of rows a run."""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """Stored tokens that the same rows see; a chain of nodes without a branch is one run.

    The first `partial_rows` of its rows end inside the run; the others see all of it.
    """

    pages: Int32  # [pages]
    tokens: int
    depth: int  # runs above it
    row_start: int
    row_stop: int
    partial_visible: Int32  # [partial rows] tokens that each of them sees, ascending

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def whole_tokens(self) -> int:
        """Leading tokens that every row sees."""
        return int(self.partial_visible[0]) - 1 if len(self.partial_visible) else self.tokens

    @property
    def is_staircase(self) -> bool:
        """Row i sees tokens 0..i of those after `whole_tokens`: what a causal call computes."""
        steps = np.arange(self.whole_tokens + 1, self.tokens, dtype=np.int32)
        return bool(np.array_equal(self.partial_visible, steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    runs: list[PrefixRun]  # parents before children
    row_order: Int32  # [rows] the layout's row at each place of the depth-first order
    row_place: Int32  # [rows] the inverse

    @property
    def in_order(self) -> bool:
        """The layout's rows are in depth-first order already."""
        return bool(np.array_equal(self.row_order, np.arange(len(self.row_order))))


def row_visible(layout: AttentionLayout) -> tuple[Int32, Int32]:  # [rows] each
    """Segment of each row, and the stored tokens that the row sees."""
    segment = np.repeat(np.arange(layout.num_segments, dtype=np.int32), layout.segment_rows)
    place = np.arange(layout.num_rows, dtype=np.int32) - layout.segment_indptr[segment]
    chain = layout.chain_tokens[segment]
    stored = np.maximum(chain - layout.segment_rows[segment] + 1 + place, 0)
    return segment, np.where(layout.segment_is_item[segment], chain, stored).astype(np.int32)


def row_home(
    layout: AttentionLayout,
    segment: Int32,  # [rows]
    visible: Int32,  # [rows] stored tokens
) -> Int32:  # [rows]
    """The deepest node of which each row sees a token; -1 where it sees none."""
    home = layout.segment_node[segment].copy()
    start = np.append(layout.node_start, np.int32(0))  # node -1 reads the last
    while (above := (home >= 0) & (start[home] >= visible)).any():
        home[above] = layout.node_parent[home[above]]
    return home


def depth_first_ranks(layout: AttentionLayout) -> tuple[Int32, Int32]:  # [nodes] each
    """Place of each node in depth-first order, and the nodes in its subtree."""
    parents = layout.node_parent.tolist()
    sizes = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    ranks = [0] * len(parents)
    following = [0] * (len(parents) + 1)  # next free place below each node; the last is for roots
    for node, parent in enumerate(parents):
        ranks[node] = following[parent]
        following[parent] += sizes[node]
        following[node] = ranks[node] + 1
    return int32(ranks), int32(sizes)


def prefix_forest(layout: AttentionLayout) -> PrefixForest:
    segment, visible = row_visible(layout)
    home = row_home(layout, segment, visible)
    ranks, sizes = depth_first_ranks(layout)
    row_rank = np.append(ranks, np.int32(-1))[home]
    row_order = np.lexsort((visible, row_rank)).astype(np.int32)
    row_place = np.empty_like(row_order)
    row_place[row_order] = np.arange(len(row_order), dtype=np.int32)
    sorted_rank = row_rank[row_order]
    starts = np.searchsorted(sorted_rank, ranks)
    own_stops = np.searchsorted(sorted_rank, ranks, side="right")
    stops = np.searchsorted(sorted_rank, ranks + sizes)
    builder = _RunBuilder(layout, visible[row_order])
    for node in np.flatnonzero((stops > starts) & (layout.node_tokens > 0)).tolist():
        builder.add(node, int(starts[node]), int(own_stops[node]), int(stops[node]))
    return PrefixForest(runs=builder.runs(), row_order=row_order, row_place=row_place)


@dataclass(slots=True)
class _OpenRun:
    nodes: list[int]
    depth: int
    row_start: int
    own_stop: int
    row_stop: int


class _RunBuilder:
    """Joins nodes to runs; nodes come in the layout's order, parents first."""

    def __init__(self, layout: AttentionLayout, sorted_visible: Int32) -> None:
        self._layout = layout
        self._visible = sorted_visible
        self._runs: list[_OpenRun] = []
        self._run_of_node: dict[int, _OpenRun] = {}

    def add(self, node: int, row_start: int, own_stop: int, row_stop: int) -> None:
        above = self._run_above(node)
        if above is not None and (above.row_start, above.row_stop) == (row_start, row_stop):
            above.nodes.append(node)
            above.own_stop = own_stop
            self._run_of_node[node] = above
            return
        depth = 0 if above is None else above.depth + 1
        run = _OpenRun([node], depth, row_start, own_stop, row_stop)
        self._runs.append(run)
        self._run_of_node[node] = run

    def runs(self) -> list[PrefixRun]:
        return [self._close(run) for run in self._runs]

    def _run_above(self, node: int) -> _OpenRun | None:
        parent = int(self._layout.node_parent[node])
        while parent >= 0 and parent not in self._run_of_node:  # empty nodes make no run
            parent = int(self._layout.node_parent[parent])
        return self._run_of_node.get(parent)

    def _close(self, run: _OpenRun) -> PrefixRun:
        layout = self._layout
        pages = [layout.pages(node) for node in run.nodes]
        start = int(layout.node_start[run.nodes[0]])
        tokens = sum(int(layout.node_tokens[node]) for node in run.nodes)
        visible = self._visible[run.row_start : run.own_stop] - start
        return PrefixRun(
            pages=pages[0] if len(pages) == 1 else np.concatenate(pages),
            tokens=tokens,
            depth=run.depth,
            row_start=run.row_start,
            row_stop=run.row_stop,
            partial_visible=visible[visible < tokens],
        )
