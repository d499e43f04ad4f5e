"""The fewest reads that give every label of several tokens its exact probability."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stemserve.service.packed_tokens import PackedTokens, pack
from stemserve.service.request import Int32

ROOT = 0
KEPT_LABELS = 128  # callers ask for the same few again and again
Edge = tuple[int, int]  # node, token that follows it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelReads:
    """Log P(label) is the sum of its tokens' log-probabilities, each after the tokens before it.

    A proper prefix of a label is an inner node of their trie. A unit is an item with one suffix
    behind it; it serves the nodes on the way to its suffix, so only the deepest inner nodes need
    one (labels of one token: the empty suffix). Gathers are sorted by suffix, then depth.
    """

    suffixes: PackedTokens
    gather_suffix: Int32  # [gathers]
    gather_depth: Int32  # [gathers] tokens of the suffix before the read
    gather_indptr: Int32  # [gathers + 1]
    gather_ids: Int32
    label_reads: Int32  # positions in gather_ids, label by label
    label_indptr: Int32  # [labels + 1]
    disjoint: NDArray[np.bool_]  # [labels] no other label is a prefix of this one

    @property
    def is_one_read(self) -> bool:
        """All labels have one token: what is read is the item's last token alone."""
        return len(self.gather_suffix) == 1 and not self.suffixes.tokens.size


@dataclass(slots=True)
class _Trie:
    next_node: dict[Edge, int] = field(default_factory=dict[Edge, int])
    incoming: list[Edge] = field(default_factory=lambda: [(-1, -1)])  # [nodes]
    tokens: list[list[int]] = field(default_factory=lambda: [[]])  # [nodes] that follow it

    def insert(self, label: Sequence[int]) -> list[Edge]:
        node, edges = ROOT, list[Edge]()
        for token in label:
            edge = (node, token)
            edges.append(edge)
            if edge not in self.next_node:
                self.next_node[edge] = len(self.tokens)
                self.incoming.append(edge)
                self.tokens[node].append(token)
                self.tokens.append([])
            node = self.next_node[edge]
        return edges

    def deepest_inner(self) -> list[int]:
        return [
            node
            for node, tokens in enumerate(self.tokens)
            if tokens and not any(self.tokens[self.next_node[node, token]] for token in tokens)
        ]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        nodes = [node]
        while node != ROOT:
            node = self.incoming[node][0]
            nodes.append(node)
        return nodes[::-1]


@lru_cache(maxsize=KEPT_LABELS)
def plan_label_reads(labels: tuple[tuple[int, ...], ...]) -> LabelReads:
    """For distinct labels of at least one token."""
    if all(len(label) == 1 for label in labels):
        return _one_read(np.array(labels, dtype=np.int32).ravel())
    trie = _Trie()
    edges = [trie.insert(label) for label in labels]
    ends = {trie.next_node[label_edges[-1]] for label_edges in edges}
    paths = [trie.path(node) for node in trie.deepest_inner()]
    suffixes = [np.array([trie.incoming[n][1] for n in path[1:]], dtype=np.int32) for path in paths]
    owner, depth, nodes = _gathers(paths)
    ids = [(node, token) for node in nodes for token in trie.tokens[node]]
    position = {edge: index for index, edge in enumerate(ids)}
    reads = pack([np.array([position[e] for e in label], dtype=np.int32) for label in edges])
    fan_out = [len(trie.tokens[node]) for node in nodes]
    return LabelReads(
        suffixes=pack(suffixes),
        gather_suffix=np.array(owner, dtype=np.int32),
        gather_depth=np.array(depth, dtype=np.int32),
        gather_indptr=np.concatenate(([0], np.cumsum(fan_out))).astype(np.int32),
        gather_ids=np.array([token for _, token in ids], dtype=np.int32),
        label_reads=reads.tokens,
        label_indptr=reads.indptr,
        disjoint=np.array([not any(node in ends for node, _ in label) for label in edges]),
    )


def _one_read(ids: Int32) -> LabelReads:
    return replace(_one_read_of(len(ids)), gather_ids=ids)


@lru_cache(maxsize=KEPT_LABELS)
def _one_read_of(labels: int) -> LabelReads:
    """After the item's last token, of all labels; without their ids."""
    each = np.arange(labels + 1, dtype=np.int32)
    return LabelReads(
        suffixes=pack([each[:0]]),
        gather_suffix=each[:1],
        gather_depth=each[:1],
        gather_indptr=np.array([0, labels], dtype=np.int32),
        gather_ids=each[:0],
        label_reads=each[:-1],
        label_indptr=each,
        disjoint=np.ones(labels, dtype=np.bool_),
    )


def _gathers(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Each node once, at the first suffix that passes through it: suffix, depth, node."""
    owner, depth, nodes = list[int](), list[int](), list[int]()
    seen = set[int]()
    for index, path in enumerate(paths):
        for steps, node in enumerate(path):
            if node not in seen:
                seen.add(node)
                owner.append(index)
                depth.append(steps)
                nodes.append(node)
    return owner, depth, nodes
