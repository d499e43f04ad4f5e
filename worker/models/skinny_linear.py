"""Matrix products of a CUDA device: a kernel of our own for few rows, the library's for more."""

import torch.nn.functional as F
from torch import Tensor

from stemserve.kernels.fused.skinny_linear import NextProduct, skinny_linear, skinny_shape


class SkinnyLinear:
    """Of few rows the result may be parts of a sum, float32 [parts, rows, out].

    `following`: the product that is computed next, whose weights are sent for ahead.

    A launch takes the host several times as long as one of the library: for captured graphs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias
        self.following: SkinnyLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        shape = skinny_shape(len(x), *self._weight.shape)
        if shape is None:
            return F.linear(x, self._weight, self._bias)
        following = None if self.following is None else self.following.as_next(len(x))
        return skinny_linear(x, self._weight, self._bias, shape, following)

    def as_next(self, rows: int) -> NextProduct:
        shape = skinny_shape(rows, *self._weight.shape)
        return NextProduct(weight=self._weight, parts=1 if shape is None else shape.parts)
