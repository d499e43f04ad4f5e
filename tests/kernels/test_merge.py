"""The merge of partial results against its definition: on a GPU, or in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import HeadShape, Int32, int32
from stemserve.kernels.merge import RowMerge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 64), (3, 80), (16, 128), (28, 128)]
EMPTY_LSES = (-torch.inf, torch.inf, torch.nan)
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}


def heads(query_heads: int, head_dim: int) -> HeadShape:
    return HeadShape(query_heads=query_heads, kv_heads=1, head_dim=head_dim, scale=1.0)


def random_state(rows: int, shape: HeadShape, dtype: torch.dtype, seed: int) -> AttentionState:
    """Some parts are empty; those hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, shape.query_heads, shape.head_dim, generator=generator).to(dtype)
    lse = 5 * torch.randn(rows, shape.query_heads, generator=generator)
    for number, empty in enumerate(EMPTY_LSES):
        chosen = torch.rand(lse.shape, generator=generator) < 0.1
        lse[chosen] = empty
        out[chosen] = torch.nan if number else 3.0
    return AttentionState(out, lse)


def expected_row(state: AttentionState, parts: list[int]) -> AttentionState:
    return reference.merge_states(
        state.out[parts].unsqueeze(1).float(), state.lse[parts].unsqueeze(1)
    )


def merge(shape: HeadShape, state: AttentionState, parts: Int32, targets: Int32) -> AttentionState:
    source = AttentionState(state.out.to(DEVICE), state.lse.to(DEVICE))
    rows = int(targets.max()) + 2
    target = AttentionState(
        torch.full((rows, *state.out.shape[1:]), torch.nan, dtype=state.out.dtype, device=DEVICE),
        torch.full((rows, shape.query_heads), torch.nan, device=DEVICE),
    )
    tables = (device_tensor(parts, DEVICE), device_tensor(targets, DEVICE))
    merger = RowMerge(shape, *tables)
    for _ in range(2):
        merger.run(source, target)
    return AttentionState(target.out.cpu(), target.lse.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("query_heads", "head_dim"), SHAPES)
def test_rows_are_merged_by_their_map(query_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape, rng = heads(query_heads, head_dim), np.random.default_rng(query_heads)
    state = random_state(40, shape, dtype, seed=head_dim)
    parts = int32(rng.permutation(40)[:30].reshape(6, 5))
    parts[rng.random(parts.shape) < 0.3] = -1
    targets = int32(rng.permutation(9)[:6])
    merged = merge(shape, state, parts, targets)
    for row, used in zip(targets.tolist(), parts.tolist(), strict=True):
        wanted = expected_row(state, [part for part in used if part >= 0])
        out, lse = merged.out[row].double(), merged.lse[row].double()
        torch.testing.assert_close(out, wanted.out[0], atol=ERROR[dtype], rtol=ERROR[dtype])
        torch.testing.assert_close(lse, wanted.lse[0], atol=1e-5, rtol=1e-6)
    others = sorted({*range(len(merged.out))} - {*targets.tolist()})
    assert merged.out[others].isnan().all() and merged.lse[others].isnan().all()


def test_rows_that_no_part_sees_are_zero() -> None:
    shape = heads(2, 64)
    state = AttentionState(torch.full((2, 2, 64), torch.nan), torch.full((2, 2), -torch.inf))
    merged = merge(shape, state, np.array([[0, 1], [-1, -1]], np.int32), int32([0, 1]))
    assert (merged.out[:2] == 0).all()
    assert (merged.lse[:2] == -torch.inf).all()
