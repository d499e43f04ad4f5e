"""RMS norm on a CUDA device, with or without the residual addition before it: one launch."""

from typing import Any

from torch import Tensor

from stemserve.kernels.fused import layer_triton
from stemserve.kernels.fused.parts import parts_of
from stemserve.kernels.overlap import overlap

KERNELS: Any = layer_triton  # untyped: device code


def power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def norm_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(
    x: Tensor,  # [rows, hidden], rows may be strided
    weight: Tensor,  # [hidden]
    eps: float,
) -> Tensor:  # [rows, hidden]
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: Tensor,  # [rows, hidden], rows may be strided; or parts of a sum [parts, rows, hidden]
    residual: Tensor,  # [rows, hidden], contiguous; x is added in place
    weight: Tensor,  # [hidden]
    eps: float,
) -> Tensor:  # [rows, hidden], the norm of the sum
    if not residual.is_contiguous() or residual.shape != x.shape[-2:]:
        raise ValueError(
            f"the residual must be contiguous and of shape {tuple(x.shape[-2:])}, "
            f"not {tuple(residual.shape)} with strides {residual.stride()}"
        )
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    parts = parts_of(x)
    rows, hidden = parts.rows, parts.width
    if not weight.is_contiguous():
        raise ValueError("the weights must be contiguous")
    out = x.new_empty((rows, hidden), dtype=weight.dtype)
    if not rows:
        return out
    block = power_of_2(hidden)
    KERNELS.norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        parts.row_stride,
        parts.part_stride,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADD=residual is not None,
        PARTS=parts.parts,
        num_warps=norm_warps(block),
        **overlap(x.device),
    )
    return out
