"""Several token sequences in one array, with the offsets between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stemserve.service.request import Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    tokens: Int32
    indptr: Int32  # [sequences + 1]; sequence i is tokens[indptr[i]:indptr[i + 1]]

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, index: int) -> Int32:
        return self.tokens[self.indptr[index] : self.indptr[index + 1]]

    @property
    def lengths(self) -> Int32:
        return self.indptr[1:] - self.indptr[:-1]

    def take(self, rows: Int32) -> "PackedTokens":
        """The sequences `rows`, in that order; a row may come several times."""
        return self._slices(self.indptr[:-1][rows], self.lengths[rows])

    def heads(self, lengths: Int32) -> "PackedTokens":
        """The first lengths[i] tokens of each sequence i, or all if it has fewer."""
        return self._slices(self.indptr[:-1], np.minimum(lengths, self.lengths))

    def _slices(self, starts: Int32, lengths: Int32) -> "PackedTokens":
        indices = slice_indices(starts, lengths)
        return PackedTokens(tokens=self.tokens[indices], indptr=offsets(lengths))


def offsets(lengths: Int32) -> Int32:  # [sequences + 1]
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    lengths.cumsum(out=indptr[1:])
    return indptr


def slice_indices(starts: Int32, lengths: Int32) -> Int32:
    """starts[0], starts[0] + 1, ... (lengths[0] values), then the same for the next slice."""
    indptr = offsets(lengths)
    return (starts - indptr[:-1]).repeat(lengths) + np.arange(indptr[-1], dtype=np.int32)


def pack(sequences: Sequence[Int32]) -> PackedTokens:
    lengths = np.fromiter(map(len, sequences), dtype=np.int32, count=len(sequences))
    tokens = np.concatenate(sequences) if sequences else np.zeros(0, dtype=np.int32)
    return PackedTokens(tokens=tokens.astype(np.int32, copy=False), indptr=offsets(lengths))


def join(first: PackedTokens, second: PackedTokens) -> PackedTokens:
    """Sequence i is first[i] followed by second[i]."""
    if not second.tokens.size:
        return first
    indptr = first.indptr + second.indptr
    tokens = np.empty(indptr[-1], dtype=np.int32)
    tokens[slice_indices(indptr[:-1], first.lengths)] = first.tokens
    tokens[slice_indices(indptr[:-1] + first.lengths, second.lengths)] = second.tokens
    return PackedTokens(tokens=tokens, indptr=indptr)


def repeat(sequence: Int32, count: int) -> PackedTokens:
    return PackedTokens(
        tokens=np.tile(sequence, count),
        indptr=np.arange(count + 1, dtype=np.int32) * np.int32(len(sequence)),
    )
