"""Matrix products with a fixed weight matrix, by the fastest plain way for its device."""

from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x @ weight.T + bias."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [rows, in] -> [rows, out]


@runtime_checkable
class AddingLinear(Protocol):
    """A product that can be added to something in the same launch."""

    def adds(self, rows: int) -> bool:
        """Whether that is the faster way for so many rows."""
        ...

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total [rows, out] += x @ weight.T, rounded once."""
        ...


# Qwen3-0.6B, 8,192 rows on an H200: each product 2 us slower, its norm 10 us faster; 4B 0 and 20.
ADDED_ROWS = 6144


@dataclass(slots=True)
class ProductWay:
    """How the products of few rows are computed now; 0: as those of many."""

    number: int = 0


class DenseLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def adds(self, rows: int) -> bool:
        return rows >= ADDED_ROWS and self._bias is None and self._weight.is_cuda

    def add_to(self, total: Tensor, x: Tensor) -> None:
        torch.addmm(total, x, self._weight.T, out=total)


class PackedLinear:
    """float32 on a CPU, with the weights in oneDNN's blocked layout.

    One thread, [rows, 576] by [3072, 576], AMD EPYC: 2 to 3 times faster than F.linear (MKL) from
    4 rows up with AVX-512, 1.2 times or more with AVX2, even at 1 row. Pre-transposing the weights
    for torch.mm gains nothing.

    Long sums are cut: oneDNN adds up 1,536 products with twice MKL's rounding error, and the
    outliers that pass through a down projection make that 1.6e-4 in a log-probability of SmolLM2
    (30 random texts). In blocks it is 5e-5, as with MKL, for 8 % of the product's time.
    """

    # A hint for the layout: 16 to 512 give the same one, 1 gives a slower one.
    _ROWS = 64
    _LONGEST_SUM = 768
    _BLOCK = 384

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        width = weight.shape[1]
        block = self._BLOCK if width > self._LONGEST_SUM else width
        self._columns = [slice(start, start + block) for start in range(0, width, block)]
        self._packed: list[Tensor] = [
            torch.ops.mkldnn._reorder_linear_weight(weight[:, part].contiguous(), self._ROWS)
            for part in self._columns
        ]

    def __call__(self, x: Tensor) -> Tensor:
        out = _product(x[:, self._columns[0]], self._packed[0], self._bias)
        for part, packed in zip(self._columns[1:], self._packed[1:], strict=True):
            out += _product(x[:, part], packed, None)
        return out


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return cast("Tensor", out)


def fastest_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    packs = weight.device.type == "cpu" and weight.dtype == torch.float32
    if packs and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)
