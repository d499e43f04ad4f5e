"""SiLU of a gate times its other half on a CUDA device: one launch."""

from typing import Any

import torch
from torch import Tensor

from stemserve.kernels.fused import layer_triton
from stemserve.kernels.fused.parts import parts_of
from stemserve.kernels.overlap import overlap

KERNELS: Any = layer_triton  # untyped: device code
BLOCK = 1024


def silu_mul(
    gate_up: Tensor,  # [rows, 2 * width], rows may be strided: gates, then what they multiply
    dtype: torch.dtype | None = None,  # of the result; None: as the input
) -> Tensor:  # [rows, width]
    """`gate_up` may be parts of a sum, [parts, rows, 2 * width]."""
    parts = parts_of(gate_up)
    rows, width = parts.rows, parts.width // 2
    out = gate_up.new_empty((rows, width), dtype=dtype or gate_up.dtype)
    if out.numel():
        KERNELS.gate_kernel[(rows, -(-width // BLOCK))](
            gate_up,
            out,
            parts.row_stride,
            parts.part_stride,
            WIDTH=width,
            BLOCK=BLOCK,
            PARTS=parts.parts,
            num_warps=4,
            **overlap(gate_up.device),
        )
    return out
