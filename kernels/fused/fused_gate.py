"""SiLU of a gate times its other half on a CUDA device: one launch."""

from typing import Any

from torch import Tensor

from stemserve.kernels.fused import fused_layer_triton

KERNELS: Any = fused_layer_triton  # untyped: device code
BLOCK = 1024


def silu_mul(
    gate_up: Tensor,  # [rows, 2 * width], rows may be strided: gates, then what they multiply
) -> Tensor:  # [rows, width]
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("the numbers of a row must lie side by side")
    out = gate_up.new_empty((rows, width))
    if out.numel():
        KERNELS.gate_kernel[(rows, -(-width // BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK, num_warps=4
        )
    return out
