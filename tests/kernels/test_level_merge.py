"""The merge of cascade levels; in Triton's interpreter where there is no GPU."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.forests import Node, Segment, make_layout, random_layout

from stemserve.kernels import reference
from stemserve.kernels.flashinfer_paths.cascade_levels import cascade_levels
from stemserve.kernels.flashinfer_paths.level_merge import LevelMerge, LevelParts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOG2E = 1.4426950408889634


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("levels", "heads", "head_dim"), [(1, 28, 128), (3, 3, 64), (5, 2, 80)])
def test_levels_merge_as_in_float64(
    levels: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(levels)
    rows = 6
    outs = torch.randn(levels, rows, heads, head_dim, generator=generator).to(dtype)
    lses = 20 * torch.randn(levels, rows, heads, generator=generator)
    seen = torch.randint(0, 1 << levels, (rows,), generator=generator, dtype=torch.int32)
    seen[0], seen[1] = 0, (1 << levels) - 1
    hidden = (seen[None, :] >> torch.arange(levels)[:, None]) & 1 == 0
    order = torch.randperm(rows, generator=generator)
    answer = reference.merge_states(outs, lses.masked_fill(hidden[:, :, None], -torch.inf))
    outs[hidden], lses[hidden] = torch.nan, torch.nan  # what is not seen may hold anything
    parts = LevelParts(outs.to(DEVICE), (lses * LOG2E).to(DEVICE))
    merge = LevelMerge(levels, seen.to(DEVICE), order.to(DEVICE, torch.int32), heads, head_dim)
    state = merge.run(parts)
    tolerance = 1e-3 if dtype is torch.float16 else 1e-2
    found = state.out.double().cpu()[order]
    torch.testing.assert_close(found, answer.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state.lse.double().cpu()[order], answer.lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(12))
def test_levels_hold_every_token_of_every_row_once(seed: int) -> None:
    layout = random_layout(np.random.default_rng(seed), page_size=16, decode=True)
    cascade = cascade_levels(layout)
    tokens = np.zeros(layout.num_rows, np.int64)
    for bit, level in enumerate(cascade.levels):
        batch = level.batch
        assert batch.rows.sum() == level.row_stop - level.row_start
        rows = np.repeat(batch.kv_tokens, batch.rows)
        tokens[level.row_start : level.row_stop] += rows
        sees = (cascade.seen[level.row_start : level.row_stop] >> bit) & 1
        np.testing.assert_array_equal(sees, rows > 0)
    segment = np.repeat(np.arange(layout.num_segments), layout.segment_rows)
    np.testing.assert_array_equal(tokens, layout.chain_tokens[segment[cascade.row_order]])


def test_rows_that_end_above_a_level_see_nothing_in_it() -> None:
    nodes = [Node(tokens=16), Node(parent=0, tokens=5), Node(parent=0, tokens=7)]
    layout = make_layout(nodes, [Segment(node=1), Segment(node=0), Segment(node=2)])
    cascade = cascade_levels(layout)
    assert [level.batch.kv_tokens.tolist() for level in cascade.levels] == [[16], [5, 7]]
    assert sorted(cascade.seen.tolist()) == [1, 3, 3]
