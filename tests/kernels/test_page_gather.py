"""The copy of pages and rows; in Triton's interpreter where there is no GPU."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.forests import head_shape

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.page_gather import TokenCopy, TokenScratch
from stemserve.kernels.token_sources import EMPTY

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES, ROWS, PAGE_SIZE = 7, 9, 4


def random_layer(seed: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerKV:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    pages = (PAGES, PAGE_SIZE, kv_heads, head_dim)
    projected = normal(ROWS, 3 * kv_heads * head_dim)  # rows are views of it, far apart
    rows = projected.view(ROWS, 3, kv_heads, head_dim)
    return LayerKV(normal(*pages), normal(*pages), rows[:, 1], rows[:, 2])


def expected(sources: list[int], slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    tokens = [
        torch.zeros_like(rows[0]) if s == EMPTY else rows[-1 - s] if s < 0 else slots[s]
        for s in sources
    ]
    return torch.stack(tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 128), (3, 64), (1, 80)])
def test_tokens_come_from_pages_rows_or_nowhere(heads: tuple[int, int], dtype: torch.dtype) -> None:
    kv = random_layer(1, *heads, dtype)
    kinds = list(np.random.default_rng(2).integers(0, 3, size=23))
    options = [[4 * n % 28, -1 - n % ROWS, EMPTY] for n in range(len(kinds))]
    sources = [option[int(kind)] for option, kind in zip(options, kinds, strict=True)]
    scratch = TokenScratch(head_shape(heads[0], *heads), DEVICE, dtype, max_tokens=64)
    k, v = scratch.tokens(len(sources))
    k.fill_(torch.nan)
    v.fill_(torch.nan)
    copy = TokenCopy(torch.tensor(sources, dtype=torch.int32, device=DEVICE), k, v)
    copy.run(random_layer(5, *heads, dtype))  # as another layer did
    copy.run(kv)
    torch.testing.assert_close(k, expected(sources, kv.k_pages.flatten(0, 1), kv.k_rows))
    torch.testing.assert_close(v, expected(sources, kv.v_pages.flatten(0, 1), kv.v_rows))


def test_rows_whose_heads_are_apart_are_copied_too() -> None:
    kv = random_layer(3, 2, 16, torch.float16)
    apart = kv._replace(k_rows=kv.k_rows.transpose(1, 2).contiguous().transpose(1, 2))
    k, v = torch.empty(2, 4, 2, 16, dtype=torch.float16, device=DEVICE)
    TokenCopy(torch.tensor([-1, -3, -2, 5], dtype=torch.int32, device=DEVICE), k, v).run(apart)
    torch.testing.assert_close(k[:3], kv.k_rows[[0, 2, 1]])


def test_a_scratch_grows_and_refuses_more_than_its_limit() -> None:
    scratch = TokenScratch(head_shape(2, 1, 8), DEVICE, torch.float16, max_tokens=10_000)
    assert [len(scratch.tokens(count)[0]) for count in (0, 1, 5000, 10_000)] == [0, 1, 5000, 10_000]
    assert scratch.capacity == 10_000
    with pytest.raises(ValueError, match="10001 tokens"):
        scratch.tokens(10_001)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float8_pages_are_widened_on_the_way(dtype: torch.dtype) -> None:
    kv = random_layer(7, 3, 64, dtype)
    pages = [tensor.to(torch.float8_e4m3fn) for tensor in (kv.k_pages, kv.v_pages)]
    kv = kv._replace(k_pages=pages[0], v_pages=pages[1])
    sources = [5, -2, EMPTY, 27, -9, 0]
    k, v = torch.full((2, len(sources), 3, 64), torch.nan, dtype=dtype, device=DEVICE)
    TokenCopy(torch.tensor(sources, dtype=torch.int32, device=DEVICE), k, v).run(kv)
    for copied, held, rows in ((k, pages[0], kv.k_rows), (v, pages[1], kv.v_rows)):
        wide = held.to(dtype).flatten(0, 1)
        torch.testing.assert_close(copied, expected(sources, wide, rows), atol=0, rtol=0)
