"""Turns quantised GGUF blocks into float32, bit for bit as the gguf package does."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_BLOCK = 32  # weights in a block of Q4_0, Q4_1 and Q8_0


def dequantize(
    data: Bytes,  # [bytes of whole blocks]
    kind: GGMLQuantizationType,
) -> Float32:  # [weights]
    """The gguf package's own code is exact for all types and five times slower."""
    match kind:
        case GGMLQuantizationType.F32:
            return data.view(np.float32)
        case GGMLQuantizationType.F16:
            return data.view(np.float16).astype(np.float32)
        case GGMLQuantizationType.BF16:
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case GGMLQuantizationType.Q8_0:
            return _q8_0(data.reshape(-1, 2 + _BLOCK))
        case GGMLQuantizationType.Q4_0:
            return _q4_0(data.reshape(-1, 2 + _BLOCK // 2))
        case GGMLQuantizationType.Q4_1:
            return _q4_1(data.reshape(-1, 4 + _BLOCK // 2))
        case _:
            flat: Float32 = gguf.quants.dequantize(data, kind).reshape(-1)
            return flat


def _half(blocks: Bytes, start: int) -> Float32:  # [blocks, 1, 1]
    column = np.ascontiguousarray(blocks[:, start : start + 2])
    return column.view(np.float16).astype(np.float32)[:, :, None]


def _nibbles(packed: Bytes) -> Float32:  # [blocks, 2, 16]: low halves, then high halves
    out = np.empty((len(packed), 2, _BLOCK // 2), np.float32)
    out[:, 0] = packed & 15
    out[:, 1] = packed >> 4
    return out


def _q8_0(blocks: Bytes) -> Float32:
    quants = blocks[:, 2:].view(np.int8).astype(np.float32)
    quants *= _half(blocks, 0)[:, 0]
    return quants.reshape(-1)


def _q4_0(blocks: Bytes) -> Float32:
    quants = _nibbles(blocks[:, 2:])
    quants -= 8
    quants *= _half(blocks, 0)
    return quants.reshape(-1)


def _q4_1(blocks: Bytes) -> Float32:
    quants = _nibbles(blocks[:, 4:])
    quants *= _half(blocks, 0)
    quants += _half(blocks, 2)
    return quants.reshape(-1)
