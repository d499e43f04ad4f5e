"""Every strategy against the float64 oracle."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
from torch import Tensor

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.kernels.torch_paths.codec_plan import CodecLimits

CPU = torch.device("cpu")
TOLERANCE = 2e-5
SHAPES = [
    head_shape(3, 3, 64),
    head_shape(9, 3, 64),
    head_shape(4, 1, 80),
    head_shape(14, 2, 128),
]
PAGE_SIZES = [1, 4, 16]
# Several workers and small parts, so that small forests are divided too.
LIMITS = CodecLimits(workers=5, min_split_tokens=16, tile_rows=3)
EVERY_LAYOUT = (Kernel.NAIVE, Kernel.SPLIT, Kernel.RAGGED, Kernel.CASCADE, Kernel.CUSTOM_MASK)
DECODE = (Kernel.PAGED, Kernel.CASCADE, Kernel.CODEC)

Strategies = Mapping[tuple[Phase, Kernel], Strategy]


def all_strategies(shape: HeadShape, costs: CostTable) -> Strategies:
    return strategies(shape, device=CPU, dtype=torch.float32, costs=costs, limits=LIMITS)


def run(strategy: Strategy, inputs: Inputs) -> AttentionState:
    assert strategy.refusal(inputs.layout) is None
    return strategy.run(strategy.plan(inputs.layout), inputs.q, inputs.kv)


def assert_oracle(state: AttentionState, inputs: Inputs) -> None:
    expected = reference.attention(inputs.layout, inputs.q, inputs.kv, inputs.shape)
    torch.testing.assert_close(state.out.double(), expected.out, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(state.lse.double(), expected.lse, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kernel", EVERY_LAYOUT)
def test_prefill_of_any_forest_is_the_oracle(kernel: Kernel, seed: int, costs: CostTable) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    layout = random_layout(rng, page_size=PAGE_SIZES[seed % len(PAGE_SIZES)])
    inputs = random_inputs(layout, shape, seed)
    assert_oracle(run(all_strategies(shape, costs)[Phase.PREFILL, kernel], inputs), inputs)


@pytest.mark.parametrize("seed", range(12))
def test_multi_item_over_one_prefix_a_tree_is_the_oracle(seed: int, costs: CostTable) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    layout = random_one_prefix_layout(rng, page_size=PAGE_SIZES[seed % len(PAGE_SIZES)])
    inputs = random_inputs(layout, shape, seed)
    assert_oracle(
        run(all_strategies(shape, costs)[Phase.PREFILL, Kernel.MULTI_ITEM], inputs), inputs
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kernel", DECODE)
def test_decode_of_any_forest_is_the_oracle(kernel: Kernel, seed: int, costs: CostTable) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    layout = random_layout(rng, page_size=PAGE_SIZES[seed % len(PAGE_SIZES)], decode=True)
    inputs = random_inputs(layout, shape, seed)
    assert_oracle(run(all_strategies(shape, costs)[Phase.DECODE, kernel], inputs), inputs)


LONG_LAYOUTS = {
    "a chunk at the end of a long chain": make_layout([Node(tokens=700)], [Segment(rows=300)]),
    "a chunk over two nodes, with items below both": make_layout(
        [Node(tokens=320), Node(parent=0, tokens=100), Node(parent=0, tokens=40)],
        [
            Segment(node=1, rows=150),
            Segment(node=1, rows=3, is_item=True),
            Segment(node=2, rows=40),
            Segment(node=0, rows=5, is_item=True),
            Segment(node=2, rows=1),
        ],
    ),
    "two chunks that end in one node": make_layout(
        [Node(tokens=48)],
        [Segment(rows=20), Segment(rows=33), Segment(rows=2), Segment(rows=4, is_item=True)],
    ),
    "items padded to one length, the last one too": items_over(20, [8, 7]),
    "long pieces that no call batches": make_layout(
        [Node(tokens=512), Node(parent=0, tokens=304), Node(parent=1, tokens=290)],
        [Segment(node=1, rows=2, is_item=True), Segment(node=2, rows=70, is_item=True)],
    ),
}


@pytest.mark.parametrize("layout", LONG_LAYOUTS.values(), ids=LONG_LAYOUTS.keys())
@pytest.mark.parametrize("kernel", EVERY_LAYOUT)
def test_long_chunks_are_the_oracle(
    kernel: Kernel, layout: AttentionLayout, costs: CostTable
) -> None:
    inputs = random_inputs(layout, SHAPES[1], seed=3)
    assert_oracle(run(all_strategies(SHAPES[1], costs)[Phase.PREFILL, kernel], inputs), inputs)


DECODE_LAYOUTS = {
    "one request": make_layout([Node(tokens=1)], [Segment()]),
    "three children and more": make_layout(
        [Node(tokens=608), *[Node(parent=0, tokens=5) for _ in range(7)]],
        [Segment(node=node) for node in (3, 1, 2, 7, 4, 5, 6)],
    ),
    "binary to depth 4, as CoDec's planner gets wrong": make_layout(
        [Node(tokens=16), *[Node(parent=(n - 1) // 2, tokens=16) for n in range(1, 31)]],
        [Segment(node=node) for node in range(15, 31)],
    ),
    "a sibling after a branched subtree": make_layout(
        [Node(tokens=32), Node(parent=0, tokens=16)]
        + [Node(parent=parent, tokens=9) for parent in (1, 1, 1, 0, 0)],
        [Segment(node=node) for node in range(2, 7)],
    ),
    "the same node twice, and rows inside the tree": make_layout(
        [Node(tokens=32), Node(parent=0, tokens=20)],
        [Segment(node=1), Segment(node=0), Segment(node=1), Segment(node=0)],
    ),
    "nothing shared": make_layout(
        [Node(tokens=tokens) for tokens in (300, 17, 1, 260)], [Segment(node=n) for n in range(4)]
    ),
}


@pytest.mark.parametrize("layout", DECODE_LAYOUTS.values(), ids=DECODE_LAYOUTS.keys())
@pytest.mark.parametrize("kernel", DECODE)
def test_decode_trees_that_other_planners_get_wrong(
    kernel: Kernel, layout: AttentionLayout, costs: CostTable
) -> None:
    inputs = random_inputs(layout, SHAPES[1], seed=5)
    assert_oracle(run(all_strategies(SHAPES[1], costs)[Phase.DECODE, kernel], inputs), inputs)


@pytest.mark.parametrize("kernel", list(Kernel))
def test_a_plan_serves_every_layer(kernel: Kernel, costs: CostTable) -> None:
    phase = Phase.DECODE if kernel in (Kernel.PAGED, Kernel.CODEC) else Phase.PREFILL
    is_item = phase is Phase.PREFILL
    layout = make_layout([Node(tokens=40)], [Segment(is_item=is_item), Segment(is_item=is_item)])
    strategy = all_strategies(SHAPES[1], costs)[phase, kernel]
    plan = strategy.plan(layout)
    for seed in range(3):
        inputs = random_inputs(layout, SHAPES[1], seed)
        assert_oracle(strategy.run(plan, inputs.q, inputs.kv), inputs)


@pytest.mark.parametrize("kernel", list(Kernel))
def test_queries_may_be_a_view_of_the_projection(kernel: Kernel, costs: CostTable) -> None:
    phase = Phase.DECODE if kernel in (Kernel.PAGED, Kernel.CODEC) else Phase.PREFILL
    layout = make_layout([Node(tokens=530)], [Segment(), Segment()][: 1 + (phase is Phase.DECODE)])
    inputs = random_inputs(layout, SHAPES[1], seed=1)
    q, shape = inputs.q, inputs.shape
    projected = torch.cat([q.flatten(1), torch.full((len(q), 100), torch.nan)], dim=1)
    view = projected[:, : shape.query_heads * shape.head_dim].view(q.shape)
    strategy = all_strategies(shape, costs)[phase, kernel]
    assert_oracle(strategy.run(strategy.plan(layout), view, inputs.kv), inputs)


@pytest.mark.parametrize("kernel", list(Kernel))
def test_states_are_contiguous(kernel: Kernel, costs: CostTable) -> None:
    phase = Phase.DECODE if kernel in (Kernel.PAGED, Kernel.CODEC) else Phase.PREFILL
    layout = make_layout([Node(tokens=600)], [Segment()])
    state = run(
        all_strategies(SHAPES[1], costs)[phase, kernel], random_inputs(layout, SHAPES[1], seed=2)
    )
    assert state.out.is_contiguous() and state.lse.is_contiguous()
    assert state.lse.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_the_torch_paths_run_on_a_gpu(seed: int, costs: CostTable) -> None:
    rng, shape, cuda = np.random.default_rng(seed), SHAPES[seed % len(SHAPES)], torch.device("cuda")
    for decode in (False, True):
        layout = random_layout(rng, page_size=16, decode=decode)
        inputs = random_inputs(layout, shape, seed)
        q, kv = inputs.q.to(cuda), LayerKV(*(tensor.to(cuda) for tensor in inputs.kv))
        for (phase, _), strategy in strategies(
            shape, device=cuda, dtype=torch.float32, costs=costs
        ).items():
            if strategy.refusal(layout) is None and (phase is Phase.DECODE) == decode:
                out, lse = strategy.run(strategy.plan(layout), q, kv)
                assert_oracle(AttentionState(out.cpu(), lse.cpu()), inputs)


def bfloat16_attention(inputs: Inputs) -> Tensor:
    """What PyTorch answers in bfloat16, segment by segment."""
    outs: list[Tensor] = []
    for segment in range(inputs.layout.num_segments):
        rows = slice(*inputs.layout.segment_indptr[segment : segment + 2].tolist())
        keys, values = reference.gather_chain(inputs.layout, segment, inputs.kv)
        keys = torch.cat([keys.bfloat16(), inputs.kv.k_rows[rows]])
        values = torch.cat([values.bfloat16(), inputs.kv.v_rows[rows]])
        seen = torch.arange(len(keys)) <= len(keys) - (rows.stop - rows.start) + torch.arange(
            rows.stop - rows.start
        ).unsqueeze(1)
        out = F.scaled_dot_product_attention(
            inputs.q[rows].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=inputs.shape.scale,
            enable_gqa=True,
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("kernel", [*EVERY_LAYOUT, Kernel.MULTI_ITEM])
def test_bfloat16_loses_no_more_than_pytorch(kernel: Kernel, costs: CostTable) -> None:
    shape = SHAPES[1]
    inputs = random_inputs(items_over(300, [5, 1, 40, 8]), shape, seed=7, dtype=torch.bfloat16)
    expected = reference.attention(inputs.layout, inputs.q, inputs.kv, shape).out
    allowed = (bfloat16_attention(inputs).double() - expected).abs()
    lost = (run(all_strategies(shape, costs)[Phase.PREFILL, kernel], inputs).out - expected).abs()
    assert lost.max() <= 2 * allowed.max()
    assert lost.mean() <= 1.5 * allowed.mean()


@pytest.mark.parametrize("batch", [1, 7, 8, 128])
@pytest.mark.parametrize("kernel", [Kernel.CASCADE, Kernel.MULTI_ITEM])
def test_b23_a_prefix_read_once_differs_little_in_bfloat16(
    kernel: Kernel, batch: int, costs: CostTable
) -> None:
    shape = head_shape(32, 8, 64)
    layout = items_over(1024, [4] * batch)
    inputs = random_inputs(layout, shape, seed=batch, dtype=torch.bfloat16)
    known = strategies(shape, device=CPU, dtype=torch.bfloat16, costs=costs, limits=LIMITS)
    once, apart = (run(known[Phase.PREFILL, name], inputs) for name in (kernel, Kernel.RAGGED))
    torch.testing.assert_close(once.out, apart.out, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kernel", DECODE)
def test_decode_refuses_items_and_rows_that_belong_to_prefill(
    kernel: Kernel, costs: CostTable
) -> None:
    strategy = all_strategies(SHAPES[0], costs)[Phase.DECODE, kernel]
    assert "item" in str(strategy.refusal(items_over(8, [1])))
    assert "one row" in str(strategy.refusal(make_layout([Node(tokens=8)], [Segment(rows=2)])))


def test_multi_item_refuses_trees_with_several_prefixes(costs: CostTable) -> None:
    strategy = all_strategies(SHAPES[0], costs)[Phase.PREFILL, Kernel.MULTI_ITEM]
    nodes = [Node(tokens=16), Node(parent=0, tokens=4)]
    branching = make_layout(nodes, [Segment(node=0, is_item=True), Segment(node=1, is_item=True)])
    assert "branches" in str(strategy.refusal(branching))
    rerun_twice = make_layout(nodes, [Segment(node=1), Segment(node=1)])
    assert "several" in str(strategy.refusal(rerun_twice))
