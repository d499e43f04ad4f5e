"""Runs of a forest against the block tables of its rows."""

import numpy as np
import pytest
from tests.kernels.forests import Node, Segment, make_layout, random_layout

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.prefix_forest import prefix_forest, row_visible


def visible_pages_slots(layout: AttentionLayout, row: int) -> list[int]:
    """Slots that a row sees, from its segment's block table."""
    segment, visible = row_visible(layout)
    table = layout.chain_pages(int(layout.segment_node[segment[row]]))
    size = layout.page_size
    return [int(table[t // size]) * size + t % size for t in range(visible[row])]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("decode", [False, True])
def test_runs_hold_every_token_of_every_row_once(seed: int, decode: bool) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, page_size=[1, 4, 16][seed % 3], decode=decode)
    forest = prefix_forest(layout)
    seen: list[list[int]] = [[] for _ in range(layout.num_rows)]
    for run in forest.runs:
        size = layout.page_size
        slots = [int(run.pages[t // size]) * size + t % size for t in range(run.tokens)]
        for place in range(run.row_start, run.row_stop):
            i = place - run.row_start
            partial = run.partial_visible
            tokens = int(partial[i]) if i < len(partial) else run.tokens
            seen[forest.row_order[place]] += slots[:tokens]
    for row in range(layout.num_rows):
        assert seen[row] == visible_pages_slots(layout, row)


def test_a_chain_without_a_branch_is_one_run() -> None:
    nodes = [Node(tokens=16), Node(parent=0, tokens=32), Node(parent=1, tokens=5)]
    (run,) = prefix_forest(make_layout(nodes, [Segment(node=2), Segment(node=2)])).runs
    assert (run.tokens, run.rows) == (53, 2)


def test_rows_in_depth_first_order_are_not_moved() -> None:
    nodes = [Node(tokens=16), Node(parent=0, tokens=4), Node(parent=0, tokens=4)]
    layout = make_layout(nodes, [Segment(node=0, rows=16), Segment(node=1), Segment(node=2)])
    assert prefix_forest(layout).in_order


def test_a_chunk_is_a_staircase_at_the_end_of_its_run() -> None:
    nodes = [Node(tokens=100)]
    items = [Segment(rows=3, is_item=True), Segment(rows=2, is_item=True)]
    (run,) = prefix_forest(make_layout(nodes, [*items, Segment(rows=60)])).runs
    assert run.whole_tokens == 40
    assert run.is_staircase
    assert run.rows == 65


def test_two_chunks_that_end_in_one_run_are_no_staircase() -> None:
    (run,) = prefix_forest(make_layout([Node(tokens=9)], [Segment(rows=4), Segment(rows=3)])).runs
    assert run.whole_tokens == 5
    assert not run.is_staircase
