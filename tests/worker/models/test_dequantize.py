"""GGUF blocks to float32, against the gguf package."""

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from stemserve.worker.models.dequantize import dequantize

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("blocks", [1, 3, 64])
def test_random_bytes_become_what_the_gguf_package_makes_of_them(
    name: str, blocks: int, seed: int
) -> None:
    kind = GGMLQuantizationType[name]
    _, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, blocks * 2 * block_bytes, dtype=np.uint8)
    # Random scales overflow and may not be numbers, which must come out alike too.
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).reshape(-1)
        values = dequantize(raw, kind)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantised_weights_come_back_bit_for_bit(name: str, seed: int) -> None:
    kind = GGMLQuantizationType[name]
    weights = np.random.default_rng(seed).normal(size=(6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, kind)
    values = dequantize(packed.view(np.uint8).reshape(-1), kind).reshape(6, 64)
    np.testing.assert_array_equal(
        values.view(np.uint32), gguf.quants.dequantize(packed, kind).view(np.uint32)
    )
    np.testing.assert_allclose(values, weights, atol=0.5)  # a step of 4 bits
