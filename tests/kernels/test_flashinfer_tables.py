"""Batches made of layouts hold what the layout says, against the float64 oracle."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.kernels.forests import (
    Node,
    Segment,
    head_shape,
    items_over,
    make_layout,
    random_inputs,
    random_layout,
    random_one_prefix_layout,
)
from tests.kernels.prefill_reader import read_tables

from stemserve.kernels import reference
from stemserve.kernels.flashinfer_paths.prefill_batch import BatchTables
from stemserve.kernels.flashinfer_paths.tables import (
    naive_outline,
    naive_tables,
    pool_tables,
    ragged_tables,
)
from stemserve.kernels.flashinfer_paths.tree_tables import (
    custom_mask_outline,
    custom_mask_tables,
    multi_item_refusal,
    multi_item_tables,
)
from stemserve.kernels.layout import AttentionLayout

SHAPE = head_shape(4, 2, 16)
PAGE_SIZES = [1, 4, 16]
Tables = Callable[[AttentionLayout], BatchTables]


def copied_tables(layout: AttentionLayout) -> BatchTables:
    """As for pages whose numbers have to be widened."""
    return ragged_tables(layout, copied=True)


EVERY_LAYOUT = [naive_tables, ragged_tables, copied_tables, custom_mask_tables]


def assert_oracle(tables: Tables, layout: AttentionLayout, seed: int) -> None:
    inputs = random_inputs(layout, SHAPE, seed)
    expected = reference.attention(layout, inputs.q, inputs.kv, SHAPE)
    state = read_tables(tables(layout), inputs.q, inputs.kv, SHAPE)
    torch.testing.assert_close(state.out, expected.out, atol=1e-9, rtol=0)
    torch.testing.assert_close(state.lse, expected.lse, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("tables", EVERY_LAYOUT)
def test_tables_of_any_forest_hold_what_rows_see(tables: Tables, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert_oracle(tables, random_layout(rng, page_size=PAGE_SIZES[seed % 3]), seed)


@pytest.mark.parametrize("seed", range(24))
def test_multi_item_tables_of_one_prefix_a_tree_hold_what_rows_see(seed: int) -> None:
    layout = random_one_prefix_layout(np.random.default_rng(seed), page_size=PAGE_SIZES[seed % 3])
    assert multi_item_refusal(layout) is None
    assert_oracle(multi_item_tables, layout, seed)


@pytest.mark.parametrize("seed", range(12))
def test_decode_tables_are_block_tables_of_the_pool(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, page_size=PAGE_SIZES[seed % 3], decode=True)
    assert pool_tables(layout, causal=False).sources is None
    assert_oracle(lambda known: pool_tables(known, causal=False), layout, seed)


LAYOUTS = {
    "no stored tokens at all": make_layout([], [Segment(node=-1, rows=3, is_item=True)]),
    "a chain without tokens": make_layout(
        [Node(tokens=0)], [Segment(rows=2, is_item=True), Segment(rows=1)]
    ),
    "more rows than tokens": make_layout([Node(tokens=5)], [Segment(rows=9)]),
    "items that end in a page": items_over(20, [3, 1, 16, 12]),
    "items over whole pages": items_over(32, [16, 1]),
    "a context chunk and items": make_layout(
        [Node(tokens=37)], [Segment(rows=20), Segment(rows=5, is_item=True)]
    ),
    "an item of no rows": items_over(16, [0, 4, 0]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("tables", [*EVERY_LAYOUT, multi_item_tables])
def test_tables_of_edge_cases(tables: Tables, layout: AttentionLayout) -> None:
    assert_oracle(tables, layout, seed=1)


def test_ragged_items_share_the_pages_of_their_prefix() -> None:
    tables = ragged_tables(items_over(320, [4] * 32))
    assert tables.sources is not None
    assert len(tables.sources) == 320 + 32 * 16  # a page of its own for each item
    copied = naive_tables(items_over(320, [4] * 32)).sources
    assert copied is not None and len(copied) == 32 * 324


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("outline", "tables"),
    [(naive_outline, naive_tables), (custom_mask_outline, custom_mask_tables)],
)
def test_an_outline_has_the_sizes_of_the_tables(outline: Tables, tables: Tables, seed: int) -> None:
    layout = random_layout(np.random.default_rng(seed), page_size=16)
    found, made = outline(layout), tables(layout)
    np.testing.assert_array_equal(found.batch.rows, made.batch.rows)
    np.testing.assert_array_equal(found.batch.kv_tokens, made.batch.kv_tokens)
    assert found.sources is not None and made.sources is not None
    assert len(found.sources) == len(made.sources)


def test_a_batch_without_items_copies_nothing() -> None:
    layout = make_layout([Node(tokens=40)], [Segment(rows=40), Segment(rows=1)])
    assert ragged_tables(layout).sources is None
    copied = copied_tables(layout)
    assert copied.sources is not None and len(copied.sources)
    assert_oracle(copied_tables, layout, 1)


def test_an_item_longer_than_16_bits_is_refused() -> None:
    assert multi_item_refusal(items_over(16, [65535])) is None
    assert "65535" in str(multi_item_refusal(items_over(16, [65536])))
    # Positions are padded to the longest request of the batch.
    many = make_layout(
        [Node(tokens=16) for _ in range(600)],
        [Segment(node=n, rows=60_000 if n == 0 else 1, is_item=True) for n in range(600)],
    )
    assert "limit" in str(multi_item_refusal(many))
