"""Beams of one search as rows of a step, and the forest of their pages where they are alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stemserve.service.batching.steps.plan_arrays import indptr_of, int32_of, ranges_of
from stemserve.service.batching.steps.prefix_forest import PrefixForest, StoredChain
from stemserve.service.request import Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeamRows:
    """Sequences of one length that part behind a common prompt, each with a last page of its own.

    Two that share a page share all pages before it.
    """

    prompt_pages: Int32  # full ones, of all
    own: Int32  # [rows, pages] behind the prompt's, up to the last that is read
    rank: Int32  # [rows] any numbers that ascend through the leaves of their tree, depth first
    tokens: int  # of each, stored once the step has run

    @property
    def last_pages(self) -> list[int]:  # [rows]
        pages: list[int] = self.own[:, -1].tolist()
        return pages

    @property
    def chains(self) -> list[StoredChain]:
        """To build a forest of them and others."""
        rows, first = len(self.own), len(self.prompt_pages)
        tables = np.empty((rows, first + self.own.shape[1]), np.int32)
        tables[:, :first], tables[:, first:] = self.prompt_pages, self.own
        return [StoredChain(table, self.tokens, table.tobytes()) for table in tables]

    def forest(self, page_size: int) -> PrefixForest:
        """Of these rows alone: as `build_forest` of their chains, without comparing what the
        search knows to be equal."""
        rows, columns = self.own.shape
        order = self.rank.argsort()
        own = self.own[order]
        shared: list[int] = (own[1:] == own[:-1]).sum(1).tolist()
        above = -len(self.prompt_pages)  # columns are counted behind the prompt's pages
        nodes = _Nodes(columns)
        nodes.add(shared, 0, rows, above, -1)
        starts, ends = int32_of(nodes.starts), int32_of(nodes.ends)
        tokens = (ends - starts) * page_size
        leaves = int32_of(nodes.leaves)
        tokens[leaves] = self.tokens - (starts[leaves] - above) * page_size
        begin = np.maximum(starts, 0)
        pages = own.ravel()[ranges_of(int32_of(nodes.rows) * columns + begin, ends - begin)]
        if nodes.starts[0] < 0:  # the prompt is in a node of its own, or in front of the first's
            pages = np.concatenate((self.prompt_pages, pages))
        chain_node = np.empty(rows, np.int32)
        chain_node[order] = leaves
        return PrefixForest(
            node_parent=int32_of(nodes.parents),
            node_page_indptr=indptr_of(ends - starts),
            node_pages=pages,
            node_tokens=tokens,
            chain_node=chain_node,
        )


class _Nodes:
    """Depth first."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.parents: list[int] = []
        self.starts: list[int] = []  # column of the first page
        self.ends: list[int] = []  # behind the last
        self.rows: list[int] = []  # one that goes through it
        self.leaves: list[int] = []  # the node that ends each row

    def add(self, shared: Sequence[int], first: int, end: int, above: int, parent: int) -> None:
        """Rows first .. end - 1, which have the columns before `above` in common; rows i and i + 1
        have the first shared[i]."""
        if end - first == 1:
            self._add_leaf(first, above, parent)
            return
        inside = shared[first : end - 1]
        border = min(inside)
        if border > above:
            parent = self._add_node(first, above, border, parent)
        if max(inside) == border:
            self._add_leaves(first, end, border, parent)
            return
        cuts = [n for n, common in enumerate(inside, first + 1) if common == border]
        for start, stop in pairwise((first, *cuts, end)):
            if stop - start == 1:
                self._add_leaf(start, border, parent)
            else:
                self.add(shared, start, stop, border, parent)

    def _add_node(self, row: int, start: int, end: int, parent: int) -> int:
        self.parents.append(parent)
        self.starts.append(start)
        self.ends.append(end)
        self.rows.append(row)
        return len(self.rows) - 1

    def _add_leaves(self, first: int, end: int, start: int, parent: int) -> None:
        count, node = end - first, len(self.rows)
        self.parents += [parent] * count
        self.starts += [start] * count
        self.ends += [self._columns] * count
        self.rows += range(first, end)
        self.leaves += range(node, node + count)

    def _add_leaf(self, row: int, start: int, parent: int) -> None:
        self.leaves.append(self._add_node(row, start, self._columns, parent))
