"""Matrix products of a CUDA device: a kernel of our own for few rows, the library's for more."""

from torch import Tensor

from stemserve.kernels.fused.skinny_linear import (
    NextProduct,
    SkinnyShape,
    skinny_linear,
    skinny_shape,
)
from stemserve.worker.models.linear import DenseLinear, ProductWay

# Bytes of the next product's weights that are sent for ahead, in each way but 0.
AHEAD = (0, 16 << 20)


class SkinnyLinear(DenseLinear):
    """Of few rows the result may be parts of a sum, float32 [parts, rows, out].

    A launch takes the host several times as long as one of the library: for captured graphs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, way: ProductWay) -> None:
        super().__init__(weight, bias)
        self._way = way
        self.following: SkinnyLinear | None = None  # the product that is computed next

    def __call__(self, x: Tensor) -> Tensor:
        shape = self._shape(len(x))
        if shape is None:
            return super().__call__(x)
        following = None if self.following is None else self.following.as_next(len(x))
        return skinny_linear(x, self._weight, self._bias, shape, following)

    def as_next(self, rows: int) -> NextProduct:
        shape = self._shape(rows)
        return NextProduct(
            weight=self._weight,
            parts=1 if shape is None else shape.parts,
            ahead=AHEAD[self._way.number - 1],
        )

    def _shape(self, rows: int) -> SkinnyShape | None:
        return skinny_shape(rows, *self._weight.shape) if self._way.number else None
