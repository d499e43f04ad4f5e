"""Cascade and split prefill by the dense kernel on a GPU, against the float64 oracle."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.dense_forests import SPELT_OUT, random_forest
from tests.kernels.forests import Inputs, Node, Segment, head_shape, make_layout, random_inputs

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.dense.attention import DenseAttention, dense_strategies
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.strategy import Kernel

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = [
    head_shape(16, 8, 128),
    head_shape(32, 8, 128),
    head_shape(28, 4, 128),
    head_shape(16, 8, 64),
    head_shape(9, 3, 64),
]
DTYPES = [torch.float16, torch.bfloat16]
KERNELS = [Kernel.CASCADE, Kernel.SPLIT]
LSE_ERROR = 2e-5
ULPS = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@cache
def strategy(kernel: Kernel, shape: HeadShape, dtype: torch.dtype) -> DenseAttention:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = {known.kernel: known for known in dense_strategies(shape, CUDA, dtype)}
    if kernel not in found:
        pytest.skip("the dense kernel needs a GPU of the Hopper generation")
    return found[kernel]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What the allocator hands out next holds NaN."""
    if torch.cuda.is_available():
        torch.full((1 << 24,), torch.nan, device=CUDA)
    yield


def on_gpu(kv: LayerKV) -> LayerKV:
    return LayerKV(*(tensor.to(CUDA) for tensor in kv))


def oracle(inputs: Inputs) -> AttentionState:
    with CUDA:
        return reference.attention(
            inputs.layout, inputs.q.to(CUDA), on_gpu(inputs.kv), inputs.shape
        )


def run(known: DenseAttention, inputs: Inputs) -> AttentionState:
    assert known.refusal(inputs.layout) is None
    plan, kv = known.plan(inputs.layout), on_gpu(inputs.kv)
    first, again = (known.run(plan, inputs.q.to(CUDA), kv) for _ in range(2))
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    return again


def rounded_weights(layout: AttentionLayout, q: Tensor, kv: LayerKV, shape: HeadShape) -> Tensor:
    """What torch loses in q's dtype: softmax in float32, its weights and the result rounded."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for segment in range(layout.num_segments):
        begin, end = (int(i) for i in layout.segment_indptr[segment : segment + 2])
        keys, values = reference.gather_chain(layout, segment, kv)
        first_seen = len(keys) - (end - begin)
        if layout.segment_is_item[segment]:
            first_seen = len(keys)
            keys = torch.cat([keys, kv.k_rows[begin:end].double()])
            values = torch.cat([values, kv.v_rows[begin:end].double()])
        mask = torch.arange(len(keys)) <= first_seen + torch.arange(end - begin).unsqueeze(1)
        keys, values = (x.repeat_interleave(shape.group, dim=1) for x in (keys, values))
        scores = torch.einsum("rhd,thd->rht", q[begin:end].double(), keys) * shape.scale
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        weights = scores.float().softmax(dim=-1).nan_to_num().to(q.dtype).double()
        out[begin:end] = torch.einsum("rht,thd->rhd", weights, values).to(q.dtype).double()
    return out


def assert_oracle(known: DenseAttention, inputs: Inputs) -> None:
    """The error is at most twice torch's, and a unit in the last place."""
    state = run(known, inputs)
    assert state.out.dtype == inputs.q.dtype
    assert state.lse.dtype == torch.float32
    expected, limit = oracle(inputs), 0.0
    if len(inputs.q):
        with CUDA:
            torchs = rounded_weights(
                inputs.layout, inputs.q.to(CUDA), on_gpu(inputs.kv), inputs.shape
            )
        limit = 2 * float((torchs - expected.out).abs().max()) + ULPS[inputs.q.dtype]
    torch.testing.assert_close(state.out.double(), expected.out, atol=limit, rtol=0)
    torch.testing.assert_close(state.lse.double(), expected.lse, atol=LSE_ERROR, rtol=1e-6)


@pytest.mark.parametrize("layout", SPELT_OUT.values(), ids=SPELT_OUT.keys())
@pytest.mark.parametrize("kernel", KERNELS)
def test_these_forests_are_the_oracle(kernel: Kernel, layout: AttentionLayout) -> None:
    shape, dtype = SHAPES[0], DTYPES[0]
    assert_oracle(strategy(kernel, shape, dtype), random_inputs(layout, shape, 1, dtype))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_forest_is_the_oracle(shape: HeadShape, dtype: torch.dtype, seed: int) -> None:
    layout = random_forest(seed + 100 * SHAPES.index(shape))
    kernel = KERNELS[seed % 2]
    assert_oracle(strategy(kernel, shape, dtype), random_inputs(layout, shape, seed, dtype))


def test_fresh_random_forests_are_the_oracle() -> None:
    for seed in np.random.SeedSequence().generate_state(4).tolist():
        print("seed", seed)
        inputs = random_inputs(random_forest(seed), SHAPES[1], seed, DTYPES[1])
        assert_oracle(strategy(Kernel.CASCADE, SHAPES[1], DTYPES[1]), inputs)


def test_a_plan_serves_every_layer() -> None:
    shape, dtype = SHAPES[0], DTYPES[0]
    layout = make_layout([Node(tokens=200)], [Segment(rows=5, is_item=True)] * 9)
    known = strategy(Kernel.CASCADE, shape, dtype)
    plan = known.plan(layout)
    for seed in range(3):
        inputs = random_inputs(layout, shape, seed, dtype)
        state = known.run(plan, inputs.q.to(CUDA), on_gpu(inputs.kv))
        torch.testing.assert_close(state.out.double(), oracle(inputs).out, atol=3e-3, rtol=0)


def test_rows_may_be_views_of_a_projection() -> None:
    shape, dtype = SHAPES[0], DTYPES[0]
    layout = make_layout([Node(tokens=300)], [Segment(rows=300), Segment(rows=7, is_item=True)])
    inputs = random_inputs(layout, shape, 3, dtype)
    known = strategy(Kernel.CASCADE, shape, dtype)
    kv, heads = inputs.kv, (shape.query_heads, shape.kv_heads, shape.kv_heads)
    joined = torch.cat([inputs.q, kv.k_rows, kv.v_rows], dim=1).to(CUDA)
    starts = np.cumsum([0, *heads]).tolist()
    q, k_rows, v_rows = (joined[:, a:b] for a, b in zip(starts, starts[1:], strict=False))
    views = on_gpu(kv)._replace(k_rows=k_rows, v_rows=v_rows)
    state = known.run(known.plan(layout), q, views)
    assert state.out.is_contiguous()
    torch.testing.assert_close(state.out.double(), oracle(inputs).out, atol=3e-3, rtol=0)


def test_a_launch_can_be_captured() -> None:
    shape, dtype = SHAPES[0], DTYPES[0]
    layout = make_layout([Node(tokens=300)], [Segment(rows=9, is_item=True)] * 9)
    inputs = random_inputs(layout, shape, 4, dtype)
    known = strategy(Kernel.CASCADE, shape, dtype)
    plan, q, kv = known.plan(layout), inputs.q.to(CUDA), on_gpu(inputs.kv)
    expected = known.run(plan, q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = known.run(plan, q, kv)
    captured.out.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(captured, expected, atol=0, rtol=0)


@pytest.mark.parametrize("layout", SPELT_OUT.values(), ids=SPELT_OUT.keys())
@pytest.mark.parametrize("room", [0, 20_000])
def test_results_are_put_where_they_are_wanted(layout: AttentionLayout, room: int) -> None:
    """With room for partial results behind them and without; layer after layer."""
    shape, dtype = SHAPES[0], DTYPES[0]
    known = strategy(Kernel.CASCADE, shape, dtype)
    inputs = random_inputs(layout, shape, 5, dtype)
    plan, q, kv = known.plan(layout), inputs.q.to(CUDA), on_gpu(inputs.kv)
    out = torch.full((len(q) + room, *q.shape[1:]), torch.nan, dtype=dtype, device=CUDA)
    pages = [(kv.k_pages, kv.v_pages), (kv.k_pages * 0.5, kv.v_pages * 0.5)]
    layers = [LayerKV(*of_layer, kv.k_rows, kv.v_rows) for of_layer in pages]
    known.run(plan, q, kv)  # compiled: what follows is launched as it was laid out once
    run = known.bound(plan, q, lambda layer: layers[layer], out)
    for layer, factor in ((0, 1.0), (1, 0.5), (0, 0.5)):
        q.mul_(factor)  # the same tensors with other numbers
        kv.v_rows.mul_(factor)
        run(layer)
        expected = known.run(known.plan(layout), q, layers[layer])
        torch.testing.assert_close(out[: len(q)], expected.out, atol=0, rtol=0)
    assert not known.fallbacks
