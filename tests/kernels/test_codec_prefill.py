"""Items, causal chunks and other divisions in the tree kernel, against attention in float64."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.codec_checks import DEVICE, check
from tests.kernels.codec_forests import Nodes, layout_of, leaves_of, random_kv

from stemserve.kernels.codec.decode import PAGE_SIZES, CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.strategy import Phase


def test_several_rows_a_segment_are_causal() -> None:
    nodes: Nodes = [(-1, 48), (0, 20), (0, 5), (-1, 37)]
    check(layout_of(nodes, [(1, 18), (2, 5), (3, 1)]), (8, 2, 64))


ITEMS: dict[str, tuple[Nodes, list[tuple[int, int, bool]]]] = {
    "short items over a prefix": ([(-1, 70)], [(0, n, True) for n in (1, 4, 4, 3, 4)]),
    "the prefix computed in the same step": ([(-1, 70)], [(0, 70, False), (0, 4, True)]),
    "long items": ([(-1, 48)], [(0, 70, True), (0, 33, True)]),
    "items under no prefix": ([], [(-1, 5, True), (-1, 20, True)]),
    "a chunk over several nodes": (
        [(-1, 32), (0, 16), (1, 9)],
        [(2, 45, False), (1, 7, True), (0, 3, True), (1, 1, False), (2, 2, True)],
    ),
    "items beside decoding": ([(-1, 64), (0, 3)], [(1, 1, False), (0, 0, True), (0, 9, True)]),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_see_their_chain_and_their_own_rows(name: str) -> None:
    nodes, segments = ITEMS[name]
    layout = layout_of(nodes, [s[:2] for s in segments], items=[s[2] for s in segments])
    check(layout, (8, 2, 64))


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_items_with_other_page_sizes_and_groups(page: int) -> None:
    check(layout_of([(-1, 70)], [(0, 40), (0, 9)], page, items=[True] * 2), (5, 1, 80), bins=3)


def test_rows_of_another_number_format_than_the_pages_are_refused() -> None:
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    numbers = DecodeNumbers(dtype=torch.float16)
    decode = CodecDecode(shape, DEVICE, numbers, 4, phase=Phase.PREFILL)
    layout = layout_of([(-1, 64)], [(0, 3)], items=[True])
    kv = random_kv(layout, shape, torch.float16, DEVICE)
    fp8 = kv._replace(k_pages=kv.k_pages.to(torch.float8_e4m3fn))
    q = torch.randn((3, 4, 64)).half().to(DEVICE)
    with pytest.raises(ValueError, match="own rows are"):
        decode.run(decode.plan(layout), q, fp8)


DIVISIONS = [
    Division(split=False, longest_first=False, parallel_reduction=False),
    Division(longest_first=False, parallel_reduction=False),
    Division(parallel_reduction=False, max_splits=2),
    Division(fixed_split=64),
    Division(fixed_split=128, longest_first=False, parallel_reduction=False),
]


@pytest.mark.parametrize("division", DIVISIONS, ids=range(len(DIVISIONS)))
def test_every_division_gives_the_result(division: Division) -> None:
    nodes: Nodes = [(-1, 208), *[(0, 30)] * 6]
    segments, items = [*leaves_of(nodes), (0, 3), (0, 20)], [False] * 6 + [True, False]
    check(layout_of(nodes, segments, items=items), (8, 2, 32), torch.float32, 4, division)


def test_impossible_divisions_are_refused() -> None:
    for tokens in (100, -64):
        with pytest.raises(ValueError, match="fixed_split"):
            Division(fixed_split=tokens)
    with pytest.raises(ValueError, match="max_splits"):
        Division(max_splits=0)
    shape = HeadShape(query_heads=4, kv_heads=2, head_dim=64, scale=0.125)
    windowed = DecodeNumbers(dtype=torch.float16, window=64)
    with pytest.raises(ValueError, match="sliding window"):
        CodecDecode(shape, DEVICE, windowed, division=Division(fixed_split=64))
