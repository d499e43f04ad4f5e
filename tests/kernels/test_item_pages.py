"""Items as stored segments with pages of a scratch."""

import numpy as np
import pytest
from tests.kernels.forests import Node, Segment, items_over, make_layout

from stemserve.kernels.codec.tiles import OWN_ROWS
from stemserve.kernels.fixed.item_pages import paged_items
from stemserve.kernels.token_sources import EMPTY


def test_an_item_goes_on_where_the_full_pages_of_its_chain_end() -> None:
    layout = items_over(10, [3, 5], page_size=4)  # pages 1, 2 and 3, of which 3 is half full
    found = paged_items(layout)
    stored = found.layout
    assert not stored.segment_is_item.any()
    assert stored.node_tokens.tolist() == [8, 2, 5, 7]
    assert stored.node_parent.tolist() == [-1, 0, 0, 0]
    assert stored.segment_node.tolist() == [2, 3]
    assert stored.chain_tokens.tolist() == [13, 15]
    pages = stored.pages(2).tolist() + stored.pages(3).tolist()
    assert [page - OWN_ROWS for page in pages] == [0, 4, 8, 12]  # first rows
    first = [12, 13, -1, -2, -3, *[EMPTY] * 3]
    assert found.sources.tolist() == [*first, 12, 13, -4, -5, -6, -7, -8, EMPTY]


def test_what_ends_in_a_cut_page_keeps_its_tokens() -> None:
    segments = [Segment(rows=6), Segment(rows=2, is_item=True), Segment(rows=1)]
    layout = make_layout([Node(tokens=7)], segments, page_size=4)
    stored = paged_items(layout).layout
    assert stored.node_tokens.tolist() == [4, 3, 5]
    assert stored.segment_node.tolist() == [1, 2, 1]
    assert stored.pages(1).tolist() == [2]
    assert stored.chain_tokens.tolist() == [7, 9, 7]


@pytest.mark.parametrize("context", [0, 4])
def test_nothing_is_cut_where_pages_are_full(context: int) -> None:
    layout = items_over(context, [2], page_size=4)
    found = paged_items(layout)
    assert found.layout.node_tokens.tolist() == [context, 2]
    assert found.sources.tolist() == [-1, -2, EMPTY, EMPTY]


def test_an_item_without_a_context_is_a_tree_of_its_own() -> None:
    layout = make_layout([Node(tokens=3)], [Segment(node=-1, rows=5, is_item=True)], page_size=4)
    stored = paged_items(layout).layout
    assert stored.node_parent.tolist() == [-1, -1]
    assert stored.segment_node.tolist() == [1]
    assert stored.chain_tokens.tolist() == [5]


def test_a_layout_without_items_stays_as_it_is() -> None:
    layout = make_layout([Node(tokens=3)], [Segment(rows=2)], page_size=4)
    assert paged_items(layout).layout is layout
    empty = paged_items(items_over(5, [0]))
    assert not empty.layout.segment_is_item.any()
    assert np.array_equal(empty.sources, [])
