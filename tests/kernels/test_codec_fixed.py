"""Fixed splits: right on any forest, and a row's part of the plan does not depend on the batch."""

import numpy as np
import pytest
from tests.kernels.codec_forests import PAGE, Nodes, layout_of, leaves_of, levels
from tests.kernels.test_codec_tiles import FORESTS, check_tables, random_forest, random_prefill

from stemserve.kernels.codec.division import Division
from stemserve.kernels.codec.fixed_tables import fixed_plan
from stemserve.kernels.layout import AttentionLayout


def whole_pages(nodes: Nodes, page: int = PAGE) -> Nodes:
    """A node with children ends with its last page."""
    inner = {parent for parent, _ in nodes}
    return [(p, t // page * page if n in inner else t) for n, (p, t) in enumerate(nodes)]


def check(layout: AttentionLayout, group: int, bins: int, tokens: int) -> None:
    host = fixed_plan(layout, group, bins, Division(fixed_split=tokens))
    check_tables(layout, host.streams, host.pieces, group, bins)
    assert host.pieces.steps.max(initial=0) <= tokens // 64


@pytest.mark.parametrize("tokens", [64, 128, 1024])
@pytest.mark.parametrize("name", FORESTS)
def test_each_row_sees_its_chain_once(name: str, tokens: int) -> None:
    nodes = whole_pages(FORESTS[name])
    layout = layout_of(nodes, leaves_of(nodes))
    for group in (1, 3, 4, 16):
        check(layout, group, 9, tokens)


@pytest.mark.parametrize("seed", range(60))
def test_items_and_chunks_of_prefixes(seed: int) -> None:
    rng = np.random.default_rng([seed, 20])
    tokens = 64 * int(rng.integers(1, 5))
    check(random_prefill(rng), int(rng.choice([1, 4, 5, 8])), int(rng.integers(1, 40)), tokens)


@pytest.mark.parametrize("seed", range(30))
def test_random_forests_with_any_page_size(seed: int) -> None:
    rng = np.random.default_rng([seed, 21])
    page = int(rng.choice([8, 16, 32, 64]))
    nodes = whole_pages(random_forest(rng, int(rng.integers(1, 60))), page)
    chosen = rng.integers(-1, len(nodes), int(rng.integers(1, 80)))
    layout = layout_of(nodes, [(int(node), 1) for node in chosen], page, rng)
    check(layout, int(rng.choice([1, 4, 7])), int(rng.integers(1, 40)), 128)


def test_a_shared_prefix_is_read_once_a_tile_and_chunk() -> None:
    nodes = levels([1, 16], [4096, 64])
    host = fixed_plan(layout_of(nodes, leaves_of(nodes)), 4, 9, Division(fixed_split=1024))
    assert host.pieces.tokens.sum() == 4096 + 16 * 64
