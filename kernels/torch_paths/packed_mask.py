"""Explicit attention masks, one bit a (row, token), packed for each request on its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32, int32

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMask:
    """Bit `row * tokens + token` of a request, little-endian in its bytes, is 1 where visible.

    Requests start at byte boundaries: the last byte of each is filled up with zeros.
    """

    bits: NDArray[np.uint8]
    byte_indptr: Int32  # [requests + 1]
    rows: Int32  # [requests]
    tokens: Int32  # [requests]

    def __post_init__(self) -> None:
        expected = _byte_indptr(self.rows, self.tokens)
        if not np.array_equal(self.byte_indptr, expected):
            raise ValueError(
                f"mask of {self.rows.tolist()} rows x {self.tokens.tolist()} tokens needs byte"
                f" offsets {expected.tolist()}, not {self.byte_indptr.tolist()}"
            )
        if self.bits.shape != (expected[-1],):
            raise ValueError(f"mask needs {expected[-1]} bytes, not an array of {self.bits.shape}")

    @classmethod
    def pack(cls, masks: Sequence[Bool]) -> "PackedMask":  # [rows, tokens] each
        if wrong := [mask.shape for mask in masks if mask.ndim != 2]:
            raise ValueError(f"the mask of a request is [rows, tokens], not {wrong[0]}")
        rows = int32([mask.shape[0] for mask in masks])
        tokens = int32([mask.shape[1] for mask in masks])
        packed = [np.packbits(mask.ravel(), bitorder="little") for mask in masks]
        return cls(
            bits=np.concatenate([np.empty(0, np.uint8), *packed]),
            byte_indptr=_byte_indptr(rows, tokens),
            rows=rows,
            tokens=tokens,
        )

    def request_bits(self, request: int) -> NDArray[np.uint8]:
        return self.bits[self.byte_indptr[request] : self.byte_indptr[request + 1]]

    def unpack(self, request: int) -> Bool:  # [rows, tokens]
        rows, tokens = int(self.rows[request]), int(self.tokens[request])
        bits = np.unpackbits(self.request_bits(request), count=rows * tokens, bitorder="little")
        return bits.reshape(rows, tokens).astype(np.bool_)


def _byte_indptr(rows: Int32, tokens: Int32) -> Int32:
    sizes = -(-rows.astype(np.int64) * tokens // 8)
    return int32(np.append(0, np.cumsum(sizes)))
