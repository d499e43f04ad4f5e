"""Numpy arrays as the packed blobs of worker.proto."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import Float32, Int32

INT32_BYTES = 4
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
NO_INT32, NO_FLOAT32 = np.frombuffer(b"", INT32), np.frombuffer(b"", FLOAT32)


def pack_int32(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    return np.asarray(values, dtype=INT32).tobytes() if len(values) else b""


def pack_parts(parts: Sequence[Int32]) -> bytes:
    """One behind the other."""
    return b"".join([np.asarray(part, dtype=INT32).tobytes() for part in parts])


def repeated_int32(value: int, count: int) -> bytes:
    """A packed blob of one value."""
    return value.to_bytes(INT32_BYTES, "little", signed=True) * count


def pack_float32(values: Float32) -> bytes:
    return np.asarray(values, dtype=FLOAT32).tobytes()


def unpack_int32(blob: bytes) -> Int32:
    return np.frombuffer(blob, dtype=INT32) if blob else NO_INT32


def unpack_float32(blob: bytes) -> Float32:
    return np.frombuffer(blob, dtype=FLOAT32) if blob else NO_FLOAT32


def join_int32(parts: Sequence[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def int32_of(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)


def ranges_of(starts: Int32, lengths: Int32) -> NDArray[np.intp]:
    """starts[0], starts[0] + 1, ... lengths[0] numbers, then the same for the next."""
    ends = lengths.cumsum()
    shifts: NDArray[np.intp] = (starts - ends + lengths).repeat(lengths)
    return shifts + np.arange(len(shifts))


def indptr_of(lengths: Int32) -> Int32:
    """Offsets of consecutive slices of these lengths."""
    indptr = np.zeros(len(lengths) + 1, np.int32)
    lengths.cumsum(out=indptr[1:])
    return indptr
