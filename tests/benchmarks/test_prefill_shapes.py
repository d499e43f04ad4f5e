import pytest
import torch
from prefill_check import Checked, chain_slots, exact_row
from prefill_shapes import MOST_ITEM_ROWS, PrefillShape, random_shapes, survey_grid

from stemserve.kernels import reference
from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape

HEADS = HeadShape(query_heads=4, kv_heads=2, head_dim=8, scale=8**-0.5)


def small(cached: bool, items: int = 3) -> PrefillShape:
    return PrefillShape(prefix=21, item=5, items=items, query_heads=16, kv_heads=8, cached=cached)


def random_inputs(layout: AttentionLayout) -> tuple[torch.Tensor, LayerKV]:
    pages = (len(layout.node_pages), layout.page_size, HEADS.kv_heads, HEADS.head_dim)
    k, v = torch.randn(pages), torch.randn(pages)
    rows = (layout.num_rows, HEADS.kv_heads, HEADS.head_dim)
    q = torch.randn(layout.num_rows, HEADS.query_heads, HEADS.head_dim)
    return q, LayerKV(k, v, torch.randn(rows), torch.randn(rows))


@pytest.mark.parametrize("cached", [False, True])
def test_every_row_of_a_shape_is_computed_as_the_oracle_does(cached: bool) -> None:
    torch.default_generator.manual_seed(3)
    layout = small(cached).layout()
    q, kv = random_inputs(layout)
    expected = reference.attention(layout, q, kv, HEADS).out
    found = torch.stack([exact_row(layout, q, kv, HEADS, row) for row in range(layout.num_rows)])
    torch.testing.assert_close(found, expected)
    checked = Checked.of(layout, q, kv, HEADS)
    assert checked.error(expected) < 1e-6
    wrong = expected.clone()
    wrong[-1] += 1
    assert checked.error(wrong) > 1e-2


@pytest.mark.parametrize("cached", [False, True])
def test_rows_and_pairs_are_those_of_the_layout(cached: bool) -> None:
    shape = small(cached)
    layout = shape.layout()
    assert layout.num_rows == shape.rows
    pairs = 0
    for segment in range(layout.num_segments):
        rows, chain = int(layout.segment_rows[segment]), int(layout.chain_tokens[segment])
        before = chain if layout.segment_is_item[segment] else chain - rows
        pairs += sum(before + i + 1 for i in range(rows))
    assert pairs == shape.pairs


def test_full_prompts_share_nothing() -> None:
    layout = small(cached=False).full_prompts()
    assert layout.num_segments == 3
    assert layout.segment_rows.tolist() == [26, 26, 26]
    slots = [set(chain_slots(layout, segment).tolist()) for segment in range(3)]
    assert not slots[0] & slots[1] and not slots[1] & slots[2]


def test_the_survey_has_its_eight_cells_and_one_prompt_alone() -> None:
    grid = survey_grid()
    assert len(grid) == 9
    floors = {(s.prefix, s.item, s.items): s.floor_us for s in grid}
    assert floors[8196, 256, 32] == pytest.approx(1056, rel=0.001)
    assert floors[8196, 0, 0] == pytest.approx(348.3, rel=0.001)


@pytest.mark.parametrize("seed", range(3))
def test_random_shapes_are_within_the_limits_and_differ_by_seed(seed: int) -> None:
    shapes = random_shapes(60, seed)
    assert len(shapes) == 60
    for shape in shapes:
        assert 1 <= shape.prefix <= 32768
        assert 1 <= shape.item <= 1024
        assert 1 <= shape.items <= 512
        assert shape.item * shape.items <= MOST_ITEM_ROWS
    assert {(s.query_heads, s.kv_heads) for s in shapes} == {(16, 8), (32, 8), (28, 4)}
    assert {s.cached for s in shapes} == {False, True}
    assert shapes == random_shapes(60, seed)
    assert shapes != random_shapes(60, seed + 1)
