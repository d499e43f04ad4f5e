"""Pages of float8: how numbers get there, and attention over them."""

import math

import numpy as np
import pytest
import torch
from tests.kernels.forests import (
    Inputs,
    floats,
    head_shape,
    random_inputs,
    random_layout,
    random_one_prefix_layout,
)

from stemserve.kernels import reference
from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.page_format import FP8, FP8_MAX, from_pages, raw, to_pages
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.codec_plan import CodecLimits

CPU = torch.device("cpu")
LIMITS = CodecLimits(workers=5, min_split_tokens=16, tile_rows=3)
PREFILL = (Kernel.NAIVE, Kernel.SPLIT, Kernel.RAGGED, Kernel.CASCADE, Kernel.CUSTOM_MASK)
# What float16 and bfloat16 lose of the oracle's numbers, of size 3 at most.
GPU_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def test_float8_saturates_and_keeps_nan() -> None:
    values = torch.tensor([0.0, 1.0625, -447.0, 460.0, 1e9, -torch.inf, torch.nan])
    kept = floats(from_pages(to_pages(values, FP8), torch.float32))
    assert kept[:6] == [0.0, 1.0, -448.0, FP8_MAX, FP8_MAX, -FP8_MAX]
    assert math.isnan(kept[6])


def test_float8_loses_a_sixteenth_at_most() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 30
    values = values[values.abs() > 2**-6]  # smaller ones are subnormal
    lost = (from_pages(to_pages(values, FP8), torch.float32) - values).abs() / values.abs()
    assert float(lost.max()) <= 1 / 16


def test_other_pages_are_as_they_are() -> None:
    values = torch.randn(5).bfloat16()
    assert raw(values) is values
    assert from_pages(to_pages(values, torch.bfloat16), torch.bfloat16) is values


def float8_inputs(layout: AttentionLayout, shape: HeadShape, seed: int) -> Inputs:
    """Own rows that are stored have the numbers that are in the pages."""
    inputs = random_inputs(layout, shape, seed)
    kept = LayerKV(*(to_pages(tensor, FP8) for tensor in inputs.kv))
    rows = (kept.k_rows.float(), kept.v_rows.float())
    return Inputs(
        layout=layout,
        shape=shape,
        q=inputs.q,
        kv=LayerKV(kept.k_pages, kept.v_pages, *rows),
    )


def check(kernel: Kernel, phase: Phase, inputs: Inputs, costs: CostTable) -> None:
    known = strategies(
        inputs.shape, device=CPU, dtype=torch.float32, costs=costs, page_dtype=FP8, limits=LIMITS
    )[phase, kernel]
    assert known.refusal(inputs.layout) is None
    state = known.run(known.plan(inputs.layout), inputs.q, inputs.kv)
    expected = reference.attention(inputs.layout, inputs.q, inputs.kv, inputs.shape)
    torch.testing.assert_close(state.out.double(), expected.out, atol=2e-5, rtol=0)
    torch.testing.assert_close(state.lse.double(), expected.lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kernel", PREFILL)
def test_prefill_over_float8_pages_is_the_oracle(
    kernel: Kernel, seed: int, costs: CostTable
) -> None:
    layout = random_layout(np.random.default_rng(seed + 100), page_size=4)
    check(kernel, Phase.PREFILL, float8_inputs(layout, head_shape(9, 3, 64), seed), costs)


@pytest.mark.parametrize("seed", range(4))
def test_multi_item_over_float8_pages_is_the_oracle(seed: int, costs: CostTable) -> None:
    layout = random_one_prefix_layout(np.random.default_rng(seed), page_size=4)
    inputs = float8_inputs(layout, head_shape(4, 2, 64), seed)
    check(Kernel.MULTI_ITEM, Phase.PREFILL, inputs, costs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kernel", [Kernel.PAGED, Kernel.CASCADE, Kernel.CODEC])
def test_decode_over_float8_pages_is_the_oracle(
    kernel: Kernel, seed: int, costs: CostTable
) -> None:
    layout = random_layout(np.random.default_rng(seed + 7), page_size=4, decode=True)
    check(kernel, Phase.DECODE, float8_inputs(layout, head_shape(4, 1, 64), seed), costs)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("phase", Phase)
def test_every_strategy_of_a_gpu_over_float8_pages_is_the_oracle(
    phase: Phase, dtype: torch.dtype, seed: int, costs: CostTable
) -> None:
    device, shape = torch.device("cuda"), head_shape(16, 8, 128)
    rng = np.random.default_rng(seed)
    one_prefix = phase is Phase.PREFILL and seed % 2 == 0
    if one_prefix:
        layout = random_one_prefix_layout(rng, page_size=16)
    else:
        layout = random_layout(rng, page_size=16, decode=phase is Phase.DECODE)
    inputs = float8_inputs(layout, shape, seed)
    q = inputs.q.to(device, dtype)
    rows = (inputs.kv.k_rows.to(device, dtype), inputs.kv.v_rows.to(device, dtype))
    kv = LayerKV(inputs.kv.k_pages.to(device), inputs.kv.v_pages.to(device), *rows)
    expected = reference.attention(layout, q.cpu(), inputs.kv, shape)
    known = strategies(shape, device=device, dtype=dtype, costs=costs, page_dtype=FP8)
    taken = [s for key, s in known.items() if key[0] is phase and s.refusal(layout) is None]
    assert taken
    for strategy in taken:
        state = strategy.run(strategy.plan(layout), q, kv)
        out = state.out.cpu().double()
        assert out.shape == expected.out.shape
        error = float((out - expected.out).abs().max()) if out.numel() else 0.0
        assert error < GPU_TOLERANCE[dtype], (strategy.kernel, error)
