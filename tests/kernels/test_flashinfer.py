"""FlashInfer's strategies on a GPU against the float64 oracle, on each of its backends by name."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.forests import (
    Inputs,
    Node,
    Segment,
    head_shape,
    items_over,
    make_layout,
    random_inputs,
    random_layout,
    random_one_prefix_layout,
)

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.flashinfer_paths.backends import (
    Backend,
    FlashInferUnavailable,
    unavailable,
)
from stemserve.kernels.flashinfer_paths.cascade import FlashInferCascadeDecode
from stemserve.kernels.flashinfer_paths.runtime import (
    FlashInferRuntime,
    flashinfer_runtime,
)
from stemserve.kernels.flashinfer_paths.strategies import (
    FlashInferCustomMask,
    FlashInferMultiItem,
    FlashInferNaive,
    FlashInferPaged,
    FlashInferRagged,
)
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.strategy import Strategy
from stemserve.kernels.torch_paths.packed_mask import PackedMask

CUDA = torch.device("cuda")
DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [
    head_shape(16, 8, 128),
    head_shape(32, 8, 128),
    head_shape(28, 4, 128),
    head_shape(16, 4, 64),
]
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LSE_ERROR = 2e-3
STRATEGIES: dict[str, Callable[[FlashInferRuntime], Strategy]] = {
    "naive": FlashInferNaive,
    "ragged": FlashInferRagged,
    "multi_item": FlashInferMultiItem,
    "custom_mask": FlashInferCustomMask,
    "paged": FlashInferPaged,
    "cascade": FlashInferCascadeDecode,
}


@cache
def strategy(name: str, shape: HeadShape, dtype: torch.dtype, backend: Backend) -> Strategy:
    try:
        runtime = flashinfer_runtime(shape, CUDA, dtype, backends=(backend,))
    except FlashInferUnavailable as error:
        pytest.skip(str(error))
    if not runtime.backends:
        pytest.skip(f"this device has no {backend}")
    return STRATEGIES[name](runtime)


PREFILL = [
    ("naive", Backend.FA2),
    ("naive", Backend.FA3),
    ("ragged", Backend.FA2),
    ("ragged", Backend.FA3),
    ("custom_mask", Backend.FA2),
]
MULTI_ITEM = [("multi_item", Backend.FA2), ("multi_item", Backend.FA3)]
DECODE = [("paged", Backend.FA2), ("paged", Backend.FA3), ("cascade", Backend.FA2)]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What the allocator hands out next holds NaN."""
    if torch.cuda.is_available():
        torch.full((1 << 22,), torch.nan, device=CUDA)
    yield


def run(known: Strategy, inputs: Inputs) -> AttentionState:
    assert known.refusal(inputs.layout) is None
    kv = LayerKV(*(tensor.to(CUDA) for tensor in inputs.kv))
    plan = known.plan(inputs.layout)
    states = [known.run(plan, inputs.q.to(CUDA), kv) for _ in range(2)]
    torch.testing.assert_close(states[0], states[1], atol=0, rtol=0)
    return states[1]


def assert_oracle(known: Strategy, inputs: Inputs) -> None:
    state = run(known, inputs)
    expected = reference.attention(inputs.layout, inputs.q, inputs.kv, inputs.shape)
    error = ERROR[inputs.q.dtype]
    assert state.out.dtype == inputs.q.dtype
    torch.testing.assert_close(state.out.double().cpu(), expected.out, atol=error, rtol=error)
    torch.testing.assert_close(state.lse.double().cpu(), expected.lse, atol=LSE_ERROR, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "backend"), PREFILL)
def test_prefill_of_any_forest_is_the_oracle(
    name: str, backend: Backend, shape: HeadShape, dtype: torch.dtype, seed: int
) -> None:
    layout = random_layout(np.random.default_rng(seed), page_size=16)
    assert_oracle(strategy(name, shape, dtype, backend), random_inputs(layout, shape, seed, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "backend"), MULTI_ITEM)
def test_multi_item_over_one_prefix_a_tree_is_the_oracle(
    name: str, backend: Backend, shape: HeadShape, dtype: torch.dtype, seed: int
) -> None:
    layout = random_one_prefix_layout(np.random.default_rng(seed), page_size=16)
    assert_oracle(strategy(name, shape, dtype, backend), random_inputs(layout, shape, seed, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "backend"), DECODE)
def test_decode_of_any_forest_is_the_oracle(
    name: str, backend: Backend, shape: HeadShape, dtype: torch.dtype, seed: int
) -> None:
    layout = random_layout(np.random.default_rng(seed), page_size=16, decode=True)
    assert_oracle(strategy(name, shape, dtype, backend), random_inputs(layout, shape, seed, dtype))


LAYOUTS = {
    "a cold prefix, partial pages, items": make_layout(
        [Node(tokens=1003)], [Segment(rows=1003), *[Segment(rows=5, is_item=True)] * 9]
    ),
    "a chunk of a cached prefix, long items": make_layout(
        [Node(tokens=700)], [Segment(rows=200), *[Segment(rows=n, is_item=True) for n in (300, 1)]]
    ),
    "many tiles between the prefix and the item": items_over(500, [3] * 300),
    "items of no prefix": make_layout(
        [], [Segment(node=-1, rows=n, is_item=True) for n in (1, 200, 3)]
    ),
    "one row over a long prefix": items_over(4001, [1]),
    "items over several roots": make_layout(
        [Node(tokens=37), Node(tokens=160), Node(tokens=1)],
        [Segment(node=n % 3, rows=1 + n, is_item=True) for n in range(30)],
    ),
    "rows that see nothing": make_layout(
        [Node(tokens=5), Node(tokens=0)],
        [Segment(rows=9), Segment(node=1, rows=2), Segment(node=1, rows=3, is_item=True)],
    ),
    "nothing is seen at all": make_layout([Node(tokens=0)], [Segment(rows=2)]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "backend"), [*PREFILL, *MULTI_ITEM])
def test_long_and_odd_layouts_are_the_oracle(
    name: str, backend: Backend, dtype: torch.dtype, layout: AttentionLayout
) -> None:
    shape = SHAPES[0]
    assert_oracle(strategy(name, shape, dtype, backend), random_inputs(layout, shape, 3, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "backend"), [*PREFILL, *MULTI_ITEM, *DECODE])
def test_plans_of_several_steps_live_side_by_side(name: str, backend: Backend) -> None:
    shape = SHAPES[0]
    known = strategy(name, shape, torch.float16, backend)
    decode = (name, backend) in DECODE
    layouts = [
        make_layout([Node(tokens=tokens)], [Segment(rows=1, is_item=not decode)] * 3)
        for tokens in (40, 3000, 517)
    ]
    plans = [known.plan(layout) for layout in layouts]
    for seed in (1, 2):
        for layout, plan in zip(layouts, plans, strict=True):
            inputs = random_inputs(layout, shape, seed, torch.float16)
            kv = LayerKV(*(tensor.to(CUDA) for tensor in inputs.kv))
            out = known.run(plan, inputs.q.to(CUDA), kv).out.double().cpu()
            expected = reference.attention(layout, inputs.q, inputs.kv, shape).out
            torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 8, 16])
def test_partial_results_of_the_most_divided_requests_fit(group: int) -> None:
    shape = head_shape(4 * group, 4, 128)
    known = strategy("ragged", shape, torch.float16, Backend.FA2)
    for tiles in (1, 8, 33, 66, 67):  # of 128 rows x heads; 66 of 4 KV heads fill an H200
        rows = tiles * 128 // group
        layout = make_layout([Node(tokens=1 << 14)], [Segment(rows=rows)])
        inputs = random_inputs(layout, shape, 1, torch.float16)
        kv = LayerKV(*(tensor.to(CUDA) for tensor in inputs.kv))
        state = known.run(known.plan(layout), inputs.q.to(CUDA), kv)
        assert state.out.isfinite().all() and state.lse.isfinite().all()


@pytest.mark.gpu
def test_a_callers_mask_hides_what_it_says() -> None:
    shape, layout = SHAPES[0], make_layout([Node(tokens=20)], [Segment(rows=6, is_item=True)])
    known = strategy("custom_mask", shape, torch.float16, Backend.FA2)
    assert isinstance(known, FlashInferCustomMask)
    mask = np.random.default_rng(4).random((6, 26)) < 0.5
    mask[2] = False
    inputs = random_inputs(layout, shape, 5, torch.float16)
    plan = known.plan_masked(layout, PackedMask.pack([mask]))
    kv = LayerKV(*(tensor.to(CUDA) for tensor in inputs.kv))
    state = known.run(plan, inputs.q.to(CUDA), kv)
    keys, values = reference.gather_chain(layout, 0, inputs.kv)
    keys, values = torch.cat([keys, inputs.kv.k_rows]), torch.cat([values, inputs.kv.v_rows])
    shown = torch.tensor(mask.tolist())
    expected = reference.masked_attention(inputs.q, keys, values, shown, shape)
    torch.testing.assert_close(state.out.double().cpu(), expected.out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(state.lse.double().cpu(), expected.lse, atol=2e-3, rtol=1e-3)
    assert (state.out[2] == 0).all() and torch.isneginf(state.lse[2]).all()


def test_what_flashinfer_cannot_serve_has_a_reason() -> None:
    shape = SHAPES[0]
    assert "CUDA" in str(unavailable(shape, torch.device("cpu"), torch.float16))
    assert "float32" in str(unavailable(shape, CUDA, torch.float32))
    assert "head_dim 80" in str(unavailable(head_shape(8, 8, 80), CUDA, torch.float16))
