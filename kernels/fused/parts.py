"""Matrices that are the sum of several: what a product of few rows leaves to its reader."""

from typing import NamedTuple

from torch import Tensor


class Parts(NamedTuple):
    parts: int
    rows: int
    width: int
    part_stride: int
    row_stride: int


def parts_of(
    matrix: Tensor,  # [rows, width], or [parts, rows, width]; numbers of a row side by side
) -> Parts:
    if matrix.stride(-1) != 1:
        raise ValueError("the numbers of a row must lie side by side")
    rows, width = matrix.shape[-2:]
    if matrix.dim() == 2:
        return Parts(1, rows, width, 0, matrix.stride(0))
    return Parts(len(matrix), rows, width, matrix.stride(0), matrix.stride(1))
