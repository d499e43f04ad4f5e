"""One plan for decode steps that follow each other, against attention in float64 at every step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import DEVICE, ERROR, assert_close, expected, run_poisoned
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, random_kv

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.growth import leaf_growth
from stemserve.kernels.codec.host_tables import table_size
from stemserve.kernels.layout import AttentionLayout, HeadShape, Int32

SHAPE = HeadShape(query_heads=4, kv_heads=2, head_dim=32, scale=32**-0.5)
STEPS = 4


def random_forest(rng: np.random.Generator) -> Nodes:
    """Inner nodes of whole pages; some leaves start with a page."""
    nodes: Nodes = [(-1, 16 * int(rng.integers(1, 9)))]
    for _ in range(int(rng.integers(0, 3))):
        nodes.append((int(rng.integers(0, len(nodes))), 16 * int(rng.integers(1, 4))))
    inner = len(nodes)
    parents = [*range(inner), *rng.integers(-1, inner, int(rng.integers(1, 20))).tolist()]
    return nodes + [(parent, int(rng.integers(1, 70))) for parent in parents]


def tokens_of_steps(layout: AttentionLayout, rng: np.random.Generator, steps: int) -> Int32:
    """[steps, segments] up to the layout's; some leaves grow in part of the steps, or never."""
    last = layout.node_tokens[layout.segment_node]
    grown = np.minimum(rng.integers(0, steps, len(last)), last - 1)
    ahead = np.minimum(np.arange(steps)[:, None], grown)
    return (last - grown + ahead).astype(np.int32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bins", [1, 3, 7])
def test_the_plan_of_the_last_step_serves_every_step(seed: int, bins: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = random_forest(rng)
    layout = layout_of(nodes, leaves_of(nodes), rng=rng)
    steps = 20 if seed % 2 else STEPS  # more than a page of tokens
    tokens = tokens_of_steps(layout, rng, steps)
    decode = CodecDecode(SHAPE, DEVICE, DecodeNumbers(dtype=torch.float32), bins)
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


def test_leaves_that_do_not_grow_have_no_entries() -> None:
    nodes: Nodes = [(-1, 32), (0, 5), (0, 20)]
    layout = layout_of(nodes, leaves_of(nodes))
    decode = CodecDecode(SHAPE, DEVICE, DecodeNumbers(dtype=torch.float32), 3)
    host = decode.planner.take(layout)
    capacity = decode.roomy_capacity(layout.num_rows, 64)
    tokens = np.tile(layout.node_tokens[layout.segment_node], (3, 1))
    growth = leaf_growth(host, capacity, tokens)
    assert growth.places.shape == (0,)
    assert growth.values.shape == (3, 0)
