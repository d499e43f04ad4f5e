"""Group the stored sequences of a step by the pages they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stemserve.service.batching.plan_arrays import indptr_of, join_int32
from stemserve.service.request import Int32


class StoredChain(NamedTuple):
    pages: Int32  # block table; entries behind the last needed page are not read
    tokens: int  # at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """Nodes in depth-first order. Chains part at page borders, so inner nodes hold whole pages."""

    node_parent: Int32  # [nodes], -1: a root
    node_page_indptr: Int32  # [nodes + 1]
    node_pages: Int32
    node_tokens: Int32  # [nodes]
    chain_node: Int32  # [chains] node that ends the chain


class _Key(NamedTuple):
    """Sorts chains so that those that share pages are neighbours, the shorter one first."""

    full_pages: bytes
    tail_page: int  # -1: none
    tail_tokens: int


def build_forest(chains: Sequence[StoredChain], page_size: int) -> PrefixForest:
    """Equal chains end in one node; a partly filled page is shared only by equal chains."""
    keys = [_key(chain, page_size) for chain in chains]
    order = sorted(range(len(chains)), key=keys.__getitem__)
    distinct = [i for n, i in enumerate(order) if n == 0 or keys[order[n - 1]] != keys[i]]
    builder = _Builder([chains[i] for i in distinct], page_size)
    builder.build()
    node_of = {keys[i]: node for i, node in zip(distinct, builder.leaves, strict=True)}
    return PrefixForest(
        node_parent=np.array(builder.parents, np.int32),
        node_page_indptr=indptr_of(np.array([len(p) for p in builder.pages], np.int32)),
        node_pages=join_int32(builder.pages),
        node_tokens=np.array(builder.tokens, np.int32),
        chain_node=np.array([node_of[key] for key in keys], np.int32),
    )


def _key(chain: StoredChain, page_size: int) -> _Key:
    full, tail = divmod(chain.tokens, page_size)
    return _Key(chain.pages[:full].tobytes(), int(chain.pages[full]) if tail else -1, tail)


class _Builder:
    """Makes nodes of sorted, distinct chains."""

    def __init__(self, chains: Sequence[StoredChain], page_size: int) -> None:
        self._chains = chains
        self._page_size = page_size
        self._full = [chain.tokens // page_size for chain in chains]
        # [i]: whole pages that chain i shares with chain i - 1
        self._shared = np.zeros(max(1, len(chains)), np.int32)
        for i in range(1, len(chains)):
            length = min(self._full[i - 1], self._full[i])
            differs = chains[i - 1].pages[:length] != chains[i].pages[:length]
            at = int(differs.argmax()) if length else 0
            self._shared[i] = at if length and differs[at] else length
        self.parents: list[int] = []
        self.pages: list[Int32] = []
        self.tokens: list[int] = []
        self.leaves = [-1] * len(chains)

    def build(self) -> None:
        # (first chain, end, pages above, parent): groups of chains that still lack nodes.
        groups = [(0, len(self._chains), 0, -1)] if self._chains else []
        while groups:
            groups += reversed(self._add_group(*groups.pop()))

    def _add_group(
        self, first: int, end: int, depth: int, parent: int
    ) -> list[tuple[int, int, int, int]]:
        """Make the node that all the chains share; returns the groups below it."""
        chain = self._chains[first]
        if end - first == 1:
            pages = self._full[first] + (chain.tokens % self._page_size > 0)
            tokens = chain.tokens - depth * self._page_size
            self.leaves[first] = self._add(parent, chain.pages[depth:pages], tokens)
            return []
        inside = self._shared[first + 1 : end]
        shared = int(inside.min())
        if shared > depth:
            tokens = (shared - depth) * self._page_size
            parent = self._add(parent, chain.pages[depth:shared], tokens)
        starts = [first, *(np.flatnonzero(inside == shared) + first + 1).tolist(), end]
        groups = [(a, b, shared, parent) for a, b in zip(starts, starts[1:], strict=False)]
        if chain.tokens == shared * self._page_size:
            self.leaves[first] = parent
            groups = groups[1:]
        return groups

    def _add(self, parent: int, pages: Int32, tokens: int) -> int:
        self.parents.append(parent)
        self.pages.append(pages)
        self.tokens.append(tokens)
        return len(self.parents) - 1
