"""The structured mask against the explicit one."""

import numpy as np
import pytest
import torch
from tests.kernels.forests import Node, Segment, floats, make_layout

from stemserve.kernels.torch_paths.custom_mask import layout_mask
from stemserve.kernels.torch_paths.item_mask import item_mask, item_tiles
from stemserve.kernels.torch_paths.logical_request import logical_requests


@pytest.mark.parametrize("seed", range(6))
def test_tiles_show_what_the_explicit_mask_shows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefix = int(rng.integers(1, 400))
    lengths = rng.choice([1, 3, 17, 150], size=rng.integers(0, 12)).tolist()
    segments = [Segment(rows=int(rng.integers(1, prefix + 1)))]
    segments += [Segment(rows=rows, is_item=True) for rows in lengths]
    layout = make_layout([Node(tokens=prefix)], segments)
    (request,) = logical_requests(layout)
    mask = item_mask(layout, request)
    shown = np.zeros((layout.num_rows, prefix + sum(lengths)), np.bool_)
    for tile in item_tiles(mask):
        columns = [*range(tile.prefix_tokens)]
        columns += [prefix + own for own in range(tile.own_start, tile.own_stop)]
        hidden = tile.mask(torch.tensor(mask.token_pos_in_items.tolist(), dtype=torch.int64))
        for row in range(tile.rows):
            added = [0.0] * len(columns) if hidden is None else floats(hidden[0, 0, row])
            seen = [column for column, bias in zip(columns, added, strict=True) if bias == 0]
            shown[tile.row_start + row, seen] = True
    np.testing.assert_array_equal(shown, layout_mask(layout, request))


def test_an_item_longer_than_16_bits_keeps_its_positions() -> None:
    layout = make_layout([Node(tokens=1)], [Segment(rows=70000, is_item=True)])
    (request,) = logical_requests(layout)
    mask = item_mask(layout, request)
    assert mask.max_item_len == 70000
    assert mask.token_pos_in_items[-1] == 69999
