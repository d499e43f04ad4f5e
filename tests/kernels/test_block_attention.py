"""One call of the attention kernel against the oracle."""

import pytest
import torch
from tests.kernels.forests import head_shape
from torch import Tensor

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.torch_paths.block_attention import attend, attend_by_matmul, causal_mask

SHAPES = [head_shape(3, 3, 64), head_shape(9, 3, 64), head_shape(4, 1, 80), head_shape(14, 2, 128)]
CPU = torch.device("cpu")


def random_blocks(shape: HeadShape, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + tokens)
    q = torch.randn(2, rows, shape.query_heads, shape.head_dim, generator=generator)
    kv = torch.randn(2, 2, tokens, shape.kv_heads, shape.head_dim, generator=generator)
    return q, kv[0], kv[1]


def assert_oracle(
    state: AttentionState, q: Tensor, k: Tensor, v: Tensor, shown: Tensor, shape: HeadShape
) -> None:
    for block in range(len(q)):
        expected = reference.masked_attention(q[block], k[block], v[block], shown[block], shape)
        torch.testing.assert_close(state.out[block].double(), expected.out, atol=2e-5, rtol=0)
        torch.testing.assert_close(state.lse[block].double(), expected.lse, atol=2e-5, rtol=0)


SIZES = [(1, 1), (1, 700), (8, 512), (9, 600), (40, 3), (3, 40), (300, 130)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "tokens"), SIZES)
def test_rows_see_all_tokens(shape: HeadShape, rows: int, tokens: int) -> None:
    q, k, v = random_blocks(shape, rows, tokens)
    shown = torch.ones(2, rows, tokens, dtype=torch.bool)
    assert_oracle(attend(q, k, v, shape), q, k, v, shown, shape)
    assert_oracle(attend_by_matmul(q, k, v, shape, None), q, k, v, shown, shape)


@pytest.mark.parametrize(("rows", "tokens"), SIZES)
def test_a_causal_row_sees_as_many_tokens_as_rows_up_to_it(rows: int, tokens: int) -> None:
    shape = SHAPES[1]
    q, k, v = random_blocks(shape, rows, tokens)
    shown = torch.ones(2, rows, tokens, dtype=torch.bool).tril()
    assert_oracle(attend(q, k, v, shape, causal=True), q, k, v, shown, shape)
    mask = causal_mask(rows, tokens, CPU)
    assert_oracle(attend_by_matmul(q, k, v, shape, mask), q, k, v, shown, shape)


@pytest.mark.parametrize("masked_rows", [1, 6])
@pytest.mark.parametrize("tokens", [20, 600])
def test_a_mask_hides_tokens(tokens: int, masked_rows: int) -> None:
    shape = SHAPES[1]
    q, k, v = random_blocks(shape, 6, tokens)
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.rand(2, 1, masked_rows, tokens, generator=generator) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    shown = ~hidden[:, 0].expand(-1, 6, -1)
    assert_oracle(attend(q, k, v, shape, mask=mask), q, k, v, shown, shape)
    assert_oracle(attend_by_matmul(q, k, v, shape, mask), q, k, v, shown, shape)
