"""Matrix products with one order of sums; in Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.row_products import alike_rows

from stemserve.kernels.fixed.product import (
    TILES,
    WIDE_TILES,
    fixed_product,
    product_tile,
)

__all__ = ["alike_rows"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Qwen3-0.6B and 4B: [outputs, width] of each product of a layer.
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 2560), (2560, 9728)]


def random(*size: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 40, 24), (70, 130, 200), (0, 8, 8)])
def test_products_agree_with_float64(
    rows: int, outputs: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = (random(n, width, dtype=dtype, seed=n) for n in (rows, outputs))
    bias = random(outputs, dtype=dtype, seed=3)
    expected = x.double() @ weight.double().T
    found = fixed_product(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
    rounded = fixed_product(x, weight, bias)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, (expected + bias.double()).to(dtype), atol=1e-4, rtol=1e-2)


def test_strided_rows_are_read_where_they_are() -> None:
    wide = random(9, 64, dtype=torch.float16, seed=1)
    weight = random(16, 32, dtype=torch.float16, seed=2)
    strided = wide[:, 32:]
    assert torch.equal(fixed_product(strided, weight), fixed_product(strided.contiguous(), weight))


def test_a_row_has_the_same_bits_in_any_place_among_any_others() -> None:
    weight = random(48, 96, dtype=torch.float16, seed=1)
    x = random(70, 96, dtype=torch.float16, seed=2)
    whole = fixed_product(x, weight)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(fixed_product(x[order], weight), whole[order])
    for row in (0, 13, 69):
        assert torch.equal(fixed_product(x[row : row + 1], weight)[0], whole[row])


@pytest.mark.parametrize(
    ("rows", "outputs", "rows_of_tile"),
    [(1, 1024, 64), (64, 4096, 64), (500, 1024, 64), (2048, 1024, 128), (16_384, 6144, 128)],
)
def test_the_tile_is_the_one_that_leaves_few_processors_idle(
    rows: int, outputs: int, rows_of_tile: int
) -> None:
    tile = product_tile(rows, outputs, 1024, 132)
    assert tile.rows == rows_of_tile
    least = min(other.seconds(rows, outputs, 1024, 132) for other in TILES)
    assert tile.seconds(rows, outputs, 1024, 132) == least


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 8).half(), torch.zeros(4, 8), "one type"),
        (torch.zeros(8, 2).half().T, torch.zeros(4, 8).half(), "side by side"),
        (torch.zeros(2, 7).half(), torch.zeros(4, 7).half(), "16 bytes"),
    ],
)
def test_what_a_tile_cannot_load_is_refused(x: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fixed_product(x.to(DEVICE), weight.to(DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_all_tiles_have_the_same_order_of_sums(
    outputs: int, width: int, dtype: torch.dtype
) -> None:
    weight, x = (random(n, width, dtype=dtype, seed=n) for n in (outputs, 700))
    whole = fixed_product(x, weight, out_dtype=torch.float32, tile=WIDE_TILES[0])
    rounded = whole.to(dtype)
    for rows in (1, 3, 64, 130, 700):
        for tile in TILES:
            assert torch.equal(fixed_product(x[-rows:], weight, tile=tile), rounded[-rows:]), tile
        for tile in WIDE_TILES:
            part = fixed_product(x[-rows:], weight, out_dtype=torch.float32, tile=tile)
            assert torch.equal(part, whole[-rows:]), tile
