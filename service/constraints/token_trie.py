"""Constraint to a set of token sequences, up to millions: sorted arrays, no object a node."""

import numpy as np
from numpy.typing import NDArray

from stemserve.service.constraints.constraint import ConstraintFault, UInt8, token_bits
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import Int32

MOST_CELLS = 1 << 25  # sequences times the longest of them: 128 MiB while they are sorted


class TokenTrie:
    """The sequences in order. Those with a prefix in common are a range of rows.

    Of each depth two arrays: the rows at which another token comes at that depth, or the same one
    behind another prefix, and those tokens. Within a range of one prefix the tokens rise.
    """

    def __init__(
        self, sequences: PackedTokens, *, vocab_size: int, end_ids: frozenset[int]
    ) -> None:
        """No sequence is empty, none holds an end id. Raises InvalidRequest."""
        self.vocab_size = vocab_size
        self.end_ids = np.array(sorted(end_ids), np.int32)
        table, self.lengths = _ordered(sequences)
        shared = _shared_tokens(table)
        self.starts: list[Int32] = []
        self.tokens: list[Int32] = []
        for depth in range(table.shape[1]):
            rows = np.flatnonzero((shared <= depth) & (self.lengths > depth)).astype(np.int32)
            self.starts.append(rows)
            self.tokens.append(table[rows, depth])

    @property
    def num_bytes(self) -> int:
        arrays = [self.lengths, *self.starts, *self.tokens]
        return sum(array.nbytes for array in arrays)

    def start(self) -> "TrieState":
        return TrieState(self)


class TrieState:
    def __init__(self, trie: TokenTrie) -> None:
        self._trie = trie
        self._depth = 0
        self._first, self._end = 0, len(trie.lengths)  # rows of what was said so far

    @property
    def is_complete(self) -> bool:
        return int(self._trie.lengths[self._first]) == self._depth  # the shortest is first

    @property
    def is_closed(self) -> bool:
        first, end = self._children()
        return first == end

    def allowed(self) -> UInt8:
        first, end = self._children()
        trie = self._trie
        ids = trie.tokens[self._depth][first:end] if first < end else trie.end_ids[:0]
        if self.is_complete:
            ids = np.concatenate((ids, trie.end_ids))
        return token_bits(ids, trie.vocab_size)

    def advance(self, token: int) -> None:
        first, end = self._children()
        if first == end:
            raise ConstraintFault(f"token {token} comes behind the end")
        children = self._trie.tokens[self._depth][first:end]
        at = first + int(np.searchsorted(children, np.int32(token)))
        if at == end or int(self._trie.tokens[self._depth][at]) != token:
            raise ConstraintFault(f"token {token} is in no sequence here")
        starts = self._trie.starts[self._depth]
        self._first = int(starts[at])
        self._end = int(starts[at + 1]) if at + 1 < end else self._end
        self._depth += 1

    def _children(self) -> tuple[int, int]:
        """A range of the depth's arrays."""
        if self._depth == len(self._trie.starts):
            return 0, 0
        starts = self._trie.starts[self._depth]
        # Of the array's own type: else all of it would be converted.
        rows = np.array((self._first, self._end), np.int32)
        first, end = np.searchsorted(starts, rows).tolist()
        return first, end


def _ordered(sequences: PackedTokens) -> tuple[Int32, Int32]:
    """[sequences, longest], each once, with -1 behind its end; and [sequences] lengths."""
    lengths = np.diff(sequences.indptr)
    count, longest = len(lengths), int(lengths.max(initial=0))
    if count * longest > MOST_CELLS:
        raise InvalidRequest(
            "token_sequences",
            f"{count} sequences of up to {longest} tokens take more than {MOST_CELLS} cells: "
            "leave the longest out",
        )
    table = np.full((count, longest), -1, np.int32)
    table[np.arange(longest) < lengths[:, None]] = sequences.tokens
    order = np.lexsort(_pairs(table).T[::-1])
    table, lengths = table[order], lengths[order]
    is_new = np.concatenate(([True], (table[1:] != table[:-1]).any(1)))
    return table[is_new], lengths[is_new].astype(np.int32)


def _pairs(table: Int32) -> NDArray[np.int64]:
    """[sequences, longest / 2] two columns each, in the same order: half as many sort keys."""
    even = np.pad(table, ((0, 0), (0, table.shape[1] % 2)), constant_values=-1).astype(np.int64)
    return (even[:, ::2] << 32) + even[:, 1::2]


def _shared_tokens(table: Int32) -> Int32:
    """[rows] leading tokens in common with the row before."""
    differs = table[1:] != table[:-1]
    return np.concatenate(([0], differs.argmax(1))).astype(np.int32)
