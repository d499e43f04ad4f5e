"""Tiles dealt out to CTAs, and divided."""

import numpy as np
import pytest

from stemserve.kernels.dense.items import divide, item_table
from stemserve.kernels.dense.tables import TILE_FIELDS
from stemserve.kernels.dense.tiles import longest_first, steps
from stemserve.kernels.layout import Int32

HEADS = 4
CTAS = 24
ROWS = 1000


def random_tiles(seed: int) -> Int32:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    tiles = np.zeros((count, TILE_FIELDS), np.int32)
    tiles[:, 0] = tiles[:, 6] = np.arange(count) * 128
    tiles[:, 1] = rng.integers(1, 129, count)
    tiles[:, 2] = rng.integers(0, 50, count)
    tiles[:, 3] = rng.integers(0, 70, count)
    tiles[:, 4] = rng.integers(100, 200, count)
    tiles[:, 5] = np.maximum(rng.integers(0, 4, count), tiles[:, 3] == 0)
    return tiles[longest_first(tiles)]


def blocks(tiles: Int32) -> list[int]:
    found: list[int] = []
    for _, _, shared, shared_count, own, own_count, _ in tiles.tolist():
        found += [*range(shared, shared + shared_count), *range(own, own + own_count)]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_every_head_of_every_tile_is_one_item(seed: int) -> None:
    tiles = random_tiles(seed)
    table = item_table(tiles, HEADS, CTAS).reshape(-1, TILE_FIELDS + 1)
    items = table[steps(table) > 0]
    expected = [[*tile, head] for tile in tiles.tolist() for head in range(HEADS)]
    assert sorted(items.tolist()) == sorted(expected)


def test_shares_are_nearly_equal() -> None:
    tiles = np.zeros((64, TILE_FIELDS), np.int32)
    tiles[:, 3] = np.arange(64, 0, -1)
    share = steps(item_table(tiles, 16, 132).reshape(-1, TILE_FIELDS + 1)).reshape(132, -1)
    assert share.sum(axis=1).max() <= 1.02 * share.sum() / 132


@pytest.mark.parametrize("seed", range(30))
def test_pieces_have_the_blocks_of_their_tile(seed: int) -> None:
    tiles = random_tiles(seed)
    division = divide(tiles, ROWS, HEADS, CTAS)
    assert (steps(division.tiles) > 0).all()
    for tile in tiles:
        pieces = division.tiles[division.tiles[:, 0] == tile[0]]
        assert sorted(blocks(pieces)) == sorted(blocks(tile[None]))
        assert (pieces[:, 1] == tile[1]).all()


@pytest.mark.parametrize("seed", range(30))
def test_every_partial_row_is_merged_once(seed: int) -> None:
    division = divide(random_tiles(seed), ROWS, HEADS, CTAS)
    parts = division.parts[division.parts >= 0]
    assert sorted(parts.tolist()) == list(range(ROWS, ROWS + division.partial_rows))
    written = division.tiles[division.tiles[:, 6] >= ROWS]
    rows = [to + row for _, count, *_, to in written.tolist() for row in range(count)]
    assert sorted(rows) == sorted(parts.tolist())
