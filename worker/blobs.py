"""Packed little-endian arrays of worker.proto, to and from numpy."""

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32


class BadPlan(ValueError):
    """A StepPlan that breaks the contract of worker.proto; nothing of it was run."""


def decode_int32(name: str, blob: bytes) -> Int32:  # [len(blob) / 4], writable
    """Raises BadPlan, by the field's name."""
    if not blob:
        return np.empty(0, np.int32)
    _check_length(name, blob)
    return np.frombuffer(blob, "<i4").astype(np.int32)  # a copy: torch wants writable arrays


def decode_float32(name: str, blob: bytes) -> NDArray[np.float32]:  # [len(blob) / 4], writable
    """Raises BadPlan, by the field's name."""
    _check_length(name, blob)
    return np.frombuffer(blob, "<f4").astype(np.float32)


def encode_int32(values: NDArray[np.integer]) -> bytes:
    return values.astype("<i4", copy=False).tobytes()


def encode_float32(values: NDArray[np.floating]) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _check_length(name: str, blob: bytes) -> None:
    if len(blob) % 4:
        raise BadPlan(f"{name} has {len(blob)} bytes, which is not a multiple of 4")
