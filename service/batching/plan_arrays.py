"""Numpy arrays as the packed blobs of worker.proto."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import Float32, Int32

INT32_BYTES = 4


def pack_int32(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes() if len(values) else b""


def repeated_int32(value: int, count: int) -> bytes:
    """A packed blob of one value."""
    return value.to_bytes(INT32_BYTES, "little", signed=True) * count


def pack_float32(values: Float32) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_int32(blob: bytes) -> Int32:
    return np.frombuffer(blob, dtype="<i4")


def unpack_float32(blob: bytes) -> Float32:
    return np.frombuffer(blob, dtype="<f4")


def join_int32(parts: Sequence[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def indptr_of(lengths: Int32) -> Int32:
    """Offsets of consecutive slices of these lengths."""
    indptr = np.zeros(len(lengths) + 1, np.int32)
    lengths.cumsum(out=indptr[1:])
    return indptr
