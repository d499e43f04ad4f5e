"""Every strategy of a phase against float64: torch's paths on the CPU, the tree kernel on a GPU or
in Triton's interpreter.
"""

from collections.abc import Sequence

import torch
from tests.kernels.codec_checks import DEVICE
from tests.kernels.forests import Inputs, Node, Segment, head_shape, make_layout, random_inputs

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Phase, Strategy
from stemserve.kernels.torch_paths.codec_plan import CodecLimits

SHAPE = head_shape(4, 2, 64)
CPU = torch.device("cpu")


def every_strategy(phase: Phase, shape: HeadShape, costs: CostTable) -> Sequence[Strategy]:
    limits = CodecLimits(workers=4, min_split_tokens=16, tile_rows=3)
    known = strategies(shape, device=CPU, dtype=torch.float32, costs=costs, limits=limits)
    numbers = DecodeNumbers(dtype=torch.float32)
    tree = CodecDecode(shape, DEVICE, numbers, 3, phase=phase)
    fixed = CodecDecode(shape, DEVICE, numbers, 3, phase=phase, division=Division(fixed_split=64))
    return [*(s for key, s in known.items() if key[0] is phase), tree, fixed]


def run(strategy: Strategy, inputs: Inputs) -> AttentionState:
    on = DEVICE if isinstance(strategy, CodecDecode) else CPU
    kv = LayerKV(*(tensor.to(on) for tensor in inputs.kv))
    out, lse = strategy.run(strategy.plan(inputs.layout), inputs.q.to(on), kv)
    return AttentionState(out.cpu(), lse.cpu())


def check_all(
    layout: AttentionLayout, phase: Phase, costs: CostTable, shape: HeadShape = SHAPE
) -> None:
    """Every strategy that takes the layout gives float64's answer; unused slots hold NaN."""
    inputs = random_inputs(layout, shape, layout.num_rows)
    oracle = reference.attention(layout, inputs.q, inputs.kv, shape)
    taken = [s for s in every_strategy(phase, shape, costs) if s.refusal(layout) is None]
    assert len(taken) >= 3
    for strategy in taken:
        state = run(strategy, inputs)
        torch.testing.assert_close(state.out.double(), oracle.out, atol=2e-5, rtol=0)
        torch.testing.assert_close(state.lse.double(), oracle.lse, atol=5e-5, rtol=0)


def decode_layout(nodes: Sequence[Node], ends: Sequence[int]) -> AttentionLayout:
    return make_layout(nodes, [Segment(node=node) for node in ends])
