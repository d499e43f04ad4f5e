"""Group the stored sequences of a step by the pages they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stemserve.service.batching.steps.plan_arrays import indptr_of, join_int32
from stemserve.service.request import Int32

PAGE_BYTES = 4  # of a page number


class StoredChain(NamedTuple):
    pages: Int32  # block table; entries behind the last needed page are not read
    tokens: int  # at least 1
    # Of a chain that ends in pages of its own, which nobody else reads: the pages up to the first
    # of them, as bytes. Such a chain keeps its place however it grows. b"": any other chain.
    own_key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """Nodes in depth-first order. Chains part at page borders, so inner nodes hold whole pages."""

    node_parent: Int32  # [nodes], -1: a root
    node_page_indptr: Int32  # [nodes + 1]
    node_pages: Int32
    node_tokens: Int32  # [nodes]
    chain_node: Int32  # [chains] node that ends the chain


def build_forest(chains: Sequence[StoredChain], page_size: int) -> PrefixForest:
    """Equal chains end in one node; a partly filled page is shared only by equal chains."""
    return _Shape(chains, page_size).fill(chains, page_size)


class ForestMemory:
    """Keeps the shape of a forest that only grows in its leaves, from one step to the next."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: list[bytes] = []
        self._shape = _Shape([], page_size)

    def build(self, chains: Sequence[StoredChain]) -> PrefixForest:
        if chains and are_one(chains):
            return _one_node(chains[0], len(chains), self._page_size)
        keys = [chain.own_key for chain in chains]
        if keys != self._keys or b"" in keys:
            self._keys, self._shape = keys, _Shape(chains, self._page_size)
        return self._shape.fill(chains, self._page_size)


def are_one(chains: Sequence[StoredChain]) -> bool:
    """All segments of the step read the same: a context and its items, say."""
    first = chains[0]
    return not first.own_key and all(
        chain.pages is first.pages and chain.tokens == first.tokens for chain in chains
    )


def _one_node(chain: StoredChain, chains: int, page_size: int) -> PrefixForest:
    pages = -(-chain.tokens // page_size)
    return PrefixForest(
        node_parent=np.array((-1,), np.int32),
        node_page_indptr=np.array((0, pages), np.int32),
        node_pages=chain.pages[:pages],
        node_tokens=np.array((chain.tokens,), np.int32),
        chain_node=np.zeros(chains, np.int32),
    )


class _Key(NamedTuple):
    """Sorts chains so that those that share pages are neighbours, the shorter one first."""

    full_pages: bytes
    tail_page: int  # -1: none
    tail_tokens: int


def _key(chain: StoredChain, page_size: int) -> _Key:
    if chain.own_key:
        return _Key(chain.own_key, -1, 0)
    full, tail = divmod(chain.tokens, page_size)
    return _Key(chain.pages[:full].tobytes(), int(chain.pages[full]) if tail else -1, tail)


class _Shape:
    """The nodes of chains, without the lengths of those that end in pages of their own."""

    def __init__(self, chains: Sequence[StoredChain], page_size: int) -> None:
        self._parents: list[int] = []
        self._depths: list[int] = []  # pages above each node
        self._ends: list[int] = []  # pages up to its end; -1: it ends where its chain does
        self._through: list[int] = []  # a chain that goes through it
        keys = [_key(chain, page_size) for chain in chains]
        order = sorted(range(len(chains)), key=keys.__getitem__)
        distinct = [i for n, i in enumerate(order) if n == 0 or keys[order[n - 1]] != keys[i]]
        leaves = self._build(distinct, [chains[i] for i in distinct], page_size)
        if len(distinct) == len(chains):
            ends = [0] * len(chains)
            for i, leaf in zip(distinct, leaves, strict=True):
                ends[i] = leaf
        else:
            node_of = {keys[i]: leaf for i, leaf in zip(distinct, leaves, strict=True)}
            ends = [node_of[key] for key in keys]
        self._node_parent = np.array(self._parents, np.int32)
        self._depth_tokens = np.array(self._depths, np.int32) * page_size
        self._end_tokens = np.array(self._ends, np.int32) * page_size
        self._chain_node = np.array(ends, np.int32)

    def fill(self, chains: Sequence[StoredChain], page_size: int) -> PrefixForest:
        """The forest of chains of this shape."""
        totals = np.array([chain.tokens for chain in chains], np.int32)[self._through]
        ends = np.where(self._end_tokens < 0, totals, self._end_tokens)
        tokens = ends - self._depth_tokens
        stops = (-(-ends // page_size)).tolist()
        parts = [
            chains[chain].pages[depth:stop]
            for chain, depth, stop in zip(self._through, self._depths, stops, strict=True)
        ]
        return PrefixForest(
            node_parent=self._node_parent,
            node_page_indptr=indptr_of(-(-tokens // page_size)),
            node_pages=join_int32(parts),
            node_tokens=tokens,
            chain_node=self._chain_node,
        )

    def _build(
        self, distinct: Sequence[int], chains: Sequence[StoredChain], page_size: int
    ) -> list[int]:
        """Of sorted chains, the node that ends each."""
        leaves = [-1] * len(chains)
        full = [_shareable_pages(chain, page_size) for chain in chains]
        shared = _shared_pages(chains, full)
        # (first chain, end, pages above, parent): groups of chains that still lack nodes.
        groups = [(0, len(chains), 0, -1)] if chains else []
        while groups:
            first, end, depth, parent = groups.pop()
            if end - first == 1:
                leaves[first] = self._add(parent, depth, -1, distinct[first])
                continue
            inside = shared[first + 1 : end]
            border = min(inside)
            if border > depth:
                parent = self._add(parent, depth, border, distinct[first])
            starts = [first, *(first + 1 + n for n, s in enumerate(inside) if s == border), end]
            if not chains[first].own_key and chains[first].tokens == border * page_size:
                leaves[first] = parent
                starts = starts[1:]
            for n in range(len(starts) - 2, -1, -1):
                groups.append((starts[n], starts[n + 1], border, parent))
        return leaves

    def _add(self, parent: int, depth: int, end: int, chain: int) -> int:
        self._parents.append(parent)
        self._depths.append(depth)
        self._ends.append(end)
        self._through.append(chain)
        return len(self._parents) - 1


def _shareable_pages(chain: StoredChain, page_size: int) -> int:
    if chain.own_key:
        return len(chain.own_key) // PAGE_BYTES - 1
    return chain.tokens // page_size


def _shared_pages(chains: Sequence[StoredChain], full: Sequence[int]) -> list[int]:
    """[i]: whole pages that chain i shares with chain i - 1."""
    shared = [0] * len(chains)
    guess = 0
    for i in range(1, len(chains)):
        before, after = chains[i - 1].pages, chains[i].pages
        length = min(full[i - 1], full[i])
        # A page has one sequence above it: chains that parted do not meet again.
        if not (
            guess <= length
            and (guess == 0 or before[guess - 1] == after[guess - 1])
            and (guess == length or before[guess] != after[guess])
        ):
            differs = before[:length] != after[:length]
            at = int(differs.argmax()) if length else 0
            guess = at if length and differs[at] else length
        shared[i] = guess
    return shared
