"""Packed products on a CPU, against plain ones."""

import pytest
import torch
import torch.nn.functional as F

from stemserve.worker.models.linear import DenseLinear, PackedLinear, fastest_linear


@pytest.mark.parametrize("rows", [0, 1, 2, 17, 100])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (96, 64), (50, 200)])
def test_packed_weights_give_the_product_of_the_plain_ones(
    rows: int, biased: bool, shape: tuple[int, int]
) -> None:
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if biased else None
    with torch.inference_mode():
        packed = PackedLinear(weight, bias)(x)
    torch.testing.assert_close(packed, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


def test_only_float32_weights_on_a_cpu_are_packed() -> None:
    weight = torch.randn(4, 4)
    assert isinstance(fastest_linear(weight), PackedLinear)
    assert isinstance(fastest_linear(weight.bfloat16()), DenseLinear)
    assert isinstance(fastest_linear(weight.to("meta")), DenseLinear)


@pytest.mark.parametrize("width", [576, 768, 1000, 1536, 3072])
def test_a_packed_product_loses_little_more_than_a_plain_one(width: int) -> None:
    weight, x = torch.randn(96, width), torch.randn(64, width)
    exact = x.double() @ weight.double().T
    packed = (PackedLinear(weight)(x) - exact).square().mean().sqrt()
    plain = (F.linear(x, weight) - exact).square().mean().sqrt()
    assert packed <= 2 * plain
