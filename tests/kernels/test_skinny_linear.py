"""Products of few rows against float64."""

import pytest
import torch

pytest.importorskip("triton")

from stemserve.kernels.fused.skinny_linear import NextProduct, SkinnyShape, skinny_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64])
def test_parts_add_up_to_the_product(rows: int, parts: int, dtype: torch.dtype) -> None:
    columns, depth = 200, 512
    wide = torch.randn(rows, depth + 8).to(dtype).to(DEVICE)
    x = wide[:, :depth]
    weight = (torch.randn(columns, depth) * depth**-0.5).to(dtype).to(DEVICE)
    bias = torch.randn(columns).to(dtype).to(DEVICE) if rows % 2 else None
    shape = SkinnyShape(columns=64, depth=64, stages=3, parts=parts)
    found = skinny_linear(x, weight, bias, shape)
    assert found.dtype == (dtype if parts == 1 else torch.float32)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    product = found.double() if parts == 1 else found.double().sum(0)
    limit = ERROR[dtype] if parts == 1 else 1e-5
    assert (product - expected).abs().max() < limit * (1 + expected.abs().max())


def test_what_is_sent_for_ahead_changes_nothing() -> None:
    x, weight = torch.randn(9, 256).half().to(DEVICE), torch.randn(100, 256).half().to(DEVICE)
    other = torch.randn(700, 128).half().to(DEVICE)
    shape = SkinnyShape(columns=64, depth=64, stages=3, parts=2)
    following = NextProduct(weight=other, parts=2, ahead=1 << 20)
    assert following.piece_bytes == 128
    assert NextProduct(weight=other, parts=1, ahead=700 * 40).piece_bytes == 32
    found = skinny_linear(x, weight, None, shape, following)
    assert torch.equal(found, skinny_linear(x, weight, None, shape))


def test_parts_of_broken_tiles_are_refused() -> None:
    x, weight = torch.zeros(2, 96).bfloat16(), torch.zeros(64, 96).bfloat16()
    shape = SkinnyShape(columns=64, depth=64, stages=3, parts=1)
    with pytest.raises(ValueError, match="whole tiles"):
        skinny_linear(x, weight, None, shape)
