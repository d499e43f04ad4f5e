"""Costs of pieces from a measured engine, and what they and the parts of the division change."""

import numpy as np
import pytest
from tests.kernels.codec_forests import layout_of, leaves_of, levels

from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.pieces import Pieces
from stemserve.kernels.codec.planner import Planner
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.engine_cost import BlockEngine, Float64, TileEngine

LEAVES = levels([1, 200], [2048, 160])
TREE = layout_of(LEAVES, leaves_of(LEAVES))
EVEN = Division(longest_first=False)


def pieces_of(
    layout: AttentionLayout, division: Division, costs: PieceCosts | None = None, bins: int = 33
) -> Pieces:
    costs = costs or PieceCosts()
    return Planner(group=4, bins=bins, window=0, costs=costs, division=division).plan(layout).pieces


def loads(pieces: Pieces, bins: int = 33) -> Float64:
    return np.bincount(pieces.bin, pieces.steps, bins).astype(np.float64)


@pytest.mark.parametrize("start", [70.0, 128.0, 250.0])
def test_a_measured_engine_says_what_a_piece_costs(start: float) -> None:
    tiles = TileEngine(
        host_seconds=1e-5,
        launch_seconds=1e-6,
        tile_rows=16,
        lanes=8,
        slots=264,
        splits=True,
        tile_tokens=start,
        token_seconds=1e-8,
    )
    grid = (64, 512, 1024, 8192, 65536)
    blocks = BlockEngine(
        launch_seconds=1e-5,
        tile_rows=64,
        rows=(1, 16),
        kv_tokens=grid,
        seconds=tuple(tuple((tokens + start) * 1e-8 for tokens in grid) for _ in range(2)),
    )
    for engine in (tiles, blocks):
        assert PieceCosts.of_engine(engine).piece == pytest.approx(start, abs=1)
    assert PieceCosts.of_engine(None) == PieceCosts()


def test_dear_pieces_make_fewer_of_them() -> None:
    cheap, dear = PieceCosts(piece=0, merge=0, slack=0), PieceCosts(piece=2000, slack=700)
    few, many = (len(pieces_of(TREE, EVEN, costs).steps) for costs in (dear, cheap))
    assert few < many


def test_without_splits_a_tile_is_one_piece() -> None:
    pieces = pieces_of(TREE, Division(split=False))
    assert len(np.unique(pieces.tile)) == len(pieces.tile) and pieces.direct.all()


def test_longest_first_balances_what_turns_do_not() -> None:
    nodes = [(-1, 64 * (40 if leaf // 16 % 5 == 0 else 2)) for leaf in range(160)]
    layout = layout_of(nodes, leaves_of(nodes))
    turns = loads(pieces_of(layout, Division(split=False, longest_first=False), bins=5), 5)
    longest = loads(pieces_of(layout, Division(split=False), bins=5), 5)
    assert longest.max() < turns.max()


def test_splits_bring_the_longest_share_to_the_mean() -> None:
    nodes = levels([1, 3], [30000, 2000])
    layout = layout_of(nodes, leaves_of(nodes))
    pieces = pieces_of(layout, Division())
    assert loads(pieces).max() <= loads(pieces).mean() * 1.1 + 2


def test_no_tile_is_cut_into_more_pieces_than_allowed() -> None:
    layout = layout_of([(-1, 64 * 1000)], [(0, 1)])
    assert len(pieces_of(layout, Division()).steps) > 30
    assert len(pieces_of(layout, Division(max_splits=8)).steps) <= 8
