"""One plan with fixed splits for decode steps that follow each other, as a burst has it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import DEVICE, ERROR, assert_close, expected, run_poisoned
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, random_kv
from tests.kernels.row_products import alike_rows

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.codec.growth import leaf_growth
from stemserve.kernels.codec.host_tables import table_size
from stemserve.kernels.layout import HeadShape

__all__ = ["alike_rows"]

SHAPE = HeadShape(query_heads=4, kv_heads=2, head_dim=32, scale=32**-0.5)
# Leaves that end before, at and behind a chunk's end in the course of the steps.
FORESTS: list[Nodes] = [
    [(-1, 48), (0, 90), (0, 80), (0, 20)],
    [(-1, 128), (0, 3), (0, 70), (-1, 130)],
    [(-1, 16), (0, 32), (1, 30), (1, 7), (0, 50), (0, 114)],
]


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("steps", [2, 20])
def test_the_plan_of_the_last_step_gives_every_step_its_own_bits(forest: Nodes, steps: int) -> None:
    layout = layout_of(forest, leaves_of(forest))
    last = layout.node_tokens[layout.segment_node]
    tokens = np.maximum(1, last - np.arange(steps)[::-1, None]).astype(np.int32)
    division = Division(fixed_split=64)
    decode = CodecDecode(SHAPE, DEVICE, DecodeNumbers(dtype=torch.float32), 3, division=division)
    host = decode.planner.take(layout)
    capacity = decode.roomy_capacity(layout.num_rows, 400)
    assert capacity.holds(host.size)
    tables = np.full(table_size(capacity, host.records.shape[1]), -7, np.int32)
    host.sections.pack(capacity, tables)
    growth = leaf_growth(host, capacity, tokens)
    buffer = torch.empty(len(tables), dtype=torch.int32, device=DEVICE)
    plan = decode.plan_at(
        buffer, capacity, decode.partial(capacity.partial_rows), host, paired=False
    )
    q = torch.randn((layout.num_rows, SHAPE.query_heads, SHAPE.head_dim)).to(DEVICE)
    for step in {0, steps // 2, steps - 1}:
        tables[growth.places] = growth.values[step]
        buffer.copy_(torch.from_numpy(tables))  # pyright: ignore[reportUnknownMemberType]
        node_tokens = layout.node_tokens.copy()
        node_tokens[layout.segment_node] = tokens[step]
        now = replace(layout, node_tokens=node_tokens)
        kv = random_kv(now, SHAPE, torch.float32, DEVICE)
        state = run_poisoned(decode, plan, q, kv)
        assert_close(state, expected(now, q, kv, SHAPE), ERROR[torch.float32])
        alone = decode.run(decode.plan(now), q, kv)
        assert torch.equal(state.out, alone.out)
