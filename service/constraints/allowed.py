"""Tokens that may come next: few as ids, many as a bit each."""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import Int32

UInt8 = NDArray[np.uint8]
ID_BITS = 32


class Allowed(Protocol):
    @property
    def ids(self) -> Int32:
        """Ascending."""
        ...

    def __len__(self) -> int: ...

    def without(self, ids: Int32) -> Self: ...

    def within(self, ids: Int32) -> Self: ...


@dataclass(frozen=True, slots=True, eq=False)
class AllowedIds:
    ids: Int32  # ascending

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, ids: Int32) -> "AllowedIds":
        return AllowedIds(self.ids[~np.isin(self.ids, ids)])

    def within(self, ids: Int32) -> "AllowedIds":
        return AllowedIds(self.ids[np.isin(self.ids, ids)])


@dataclass(frozen=True, slots=True, eq=False)
class AllowedBits:
    bits: UInt8  # one a token of the vocabulary, the lowest first

    @property
    def ids(self) -> Int32:
        return np.flatnonzero(np.unpackbits(self.bits, bitorder="little")).astype(np.int32)

    def __len__(self) -> int:
        return int(np.bitwise_count(self.bits).sum())

    def without(self, ids: Int32) -> "AllowedBits":
        """Of ids past the bits nothing is known."""
        flags = np.unpackbits(self.bits, bitorder="little")
        flags[ids[ids < len(flags)]] = 0
        return AllowedBits(np.packbits(flags, bitorder="little"))

    def within(self, ids: Int32) -> "AllowedBits":
        flags = np.unpackbits(self.bits, bitorder="little")
        kept = np.zeros_like(flags)
        kept[ids] = flags[ids]
        return AllowedBits(np.packbits(kept, bitorder="little"))


def allowed_ids(ids: Int32, vocab_size: int) -> Allowed:
    """In the shorter form. `ids` ascend."""
    if ID_BITS * len(ids) <= vocab_size:
        return AllowedIds(ids)
    flags = np.zeros(vocab_size, np.bool_)
    flags[ids] = True
    return AllowedBits(np.packbits(flags, bitorder="little"))
