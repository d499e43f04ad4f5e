"""Constraint to a set of token sequences, up to millions: a trie in arrays, no object a node."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stemserve.service.constraints.allowed import Allowed, allowed_ids
from stemserve.service.constraints.constraint import ConstraintFault
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import Int32

Bool = NDArray[np.bool_]
ROOT = 0
TOKEN_BITS = 32


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class TokenTrie:
    """Nodes by their depth, and those of one depth in the order of their sequences.

    So the children of a node lie side by side, behind those of the node before it.
    """

    vocab_size: int
    end_ids: Int32  # that may come behind a whole sequence, ascending
    sequences: int  # that differ
    first_child: Int32  # [nodes + 1]
    tokens: Int32  # [nodes] that lead to them; of the root: none
    is_end: Bool  # [nodes] a sequence ends here
    is_used: Bool  # [vocab_size] the token is in a sequence

    @property
    def num_bytes(self) -> int:
        arrays = (self.first_child, self.tokens, self.is_end, self.is_used)
        return sum(array.nbytes for array in arrays)

    @property
    def masks_take_long(self) -> bool:
        return False

    def holds(self, ids: Int32) -> bool:
        """Whether one of the tokens is in a sequence."""
        return bool(self.is_used[ids].any())

    def ending_with(self, ids: Int32) -> "TokenTrie":
        """The same sequences; these tokens may come behind one too."""
        return replace(self, end_ids=np.union1d(self.end_ids, ids))

    def start(self) -> "TrieState":
        first_child, tokens, is_end = map(_view, (self.first_child, self.tokens, self.is_end))
        views = _Views(first_child, tokens, is_end)
        return TrieState(self, views, ROOT)


class _Views(NamedTuple):
    """The arrays as what gives numbers of Python's own, in a fraction of numpy's time."""

    first_child: Sequence[int]
    tokens: Sequence[int]
    is_end: Sequence[bool]


class TrieState:
    __slots__ = ("_end", "_first", "_node", "_trie", "_views")

    def __init__(self, trie: TokenTrie, views: _Views, node: int) -> None:
        self._trie = trie
        self._views = views
        self._node = node
        self._first: int = views.first_child[node]  # of the children
        self._end: int = views.first_child[node + 1]

    @property
    def is_complete(self) -> bool:
        return self._views.is_end[self._node]

    @property
    def is_closed(self) -> bool:
        return self._first == self._end

    def allowed(self) -> Allowed:
        trie = self._trie
        ids = trie.tokens[self._first : self._end]
        if self.is_complete:
            ids = np.sort(np.concatenate((ids, trie.end_ids)))
        return allowed_ids(ids, trie.vocab_size)

    def advance(self, token: int) -> None:
        views = self._views
        at = bisect_left(views.tokens, token, self._first, self._end)
        if at == self._end or views.tokens[at] != token:
            raise ConstraintFault(f"token {token} is in no sequence here")
        self._node = at
        self._first = views.first_child[at]
        self._end = views.first_child[at + 1]

    def fork(self) -> "TrieState":
        return TrieState(self._trie, self._views, self._node)


def _view(array: NDArray[Any]) -> Any:
    return array.data


class _Level(NamedTuple):
    """The nodes of one depth."""

    tokens: Int32  # [nodes]
    is_end: Bool  # [nodes]
    children: Int32  # [nodes] how many


def build_trie(
    sequences: PackedTokens,
    *,
    vocab_size: int,
    end_ids: Int32,
    go_on: Callable[[], object] = lambda: None,
) -> TokenTrie:
    """No sequence is empty, none holds an end id. `go_on` is called at each depth; what it raises
    ends the work."""
    levels: list[_Level] = []
    for level in _levels(sequences):
        go_on()
        levels.append(level)
    children = np.concatenate([level.children for level in levels])
    first_child = np.ones(len(children) + 1, np.int32)  # the root is node 0
    np.cumsum(children, out=first_child[1:])
    first_child[1:] += 1
    is_end = np.concatenate([level.is_end for level in levels])
    is_used = np.zeros(vocab_size, np.bool_)
    is_used[sequences.tokens] = True
    return TokenTrie(
        vocab_size=vocab_size,
        end_ids=end_ids,
        sequences=int(np.count_nonzero(is_end)),
        first_child=first_child,
        tokens=np.concatenate([level.tokens for level in levels]),
        is_end=is_end,
        is_used=is_used,
    )


def _levels(sequences: PackedTokens) -> Iterator[_Level]:
    """From the root on. Rows are sequences that are long enough, in the order of their nodes."""
    starts, lengths = sequences.indptr[:-1], sequences.lengths
    rows = np.arange(len(sequences), dtype=np.int32)
    nodes = np.zeros(len(rows), np.int64)  # of each row, at this depth
    tokens = np.full(1, -1, np.int32)
    for depth in count():
        is_end = np.zeros(len(tokens), np.bool_)
        going_on = lengths[rows] > depth
        is_end[nodes[~going_on]] = True
        rows, nodes = rows[going_on], nodes[going_on]
        keys = (nodes << TOKEN_BITS) | sequences.tokens[starts[rows] + depth]
        order = np.argsort(keys, kind="stable")  # fast where they are nearly in order
        rows, keys = rows[order], keys[order]
        is_new = np.ones(len(keys), np.bool_)
        is_new[1:] = keys[1:] != keys[:-1]
        new = keys[is_new]
        children = np.bincount(new >> TOKEN_BITS, minlength=len(tokens)).astype(np.int32)
        yield _Level(tokens, is_end, children)
        if not len(rows):
            return
        tokens = (new & ((1 << TOKEN_BITS) - 1)).astype(np.int32)
        nodes = is_new.cumsum() - 1
