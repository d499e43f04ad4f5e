"""The algebra of tiles on the slots of a GPU."""

from dataclasses import replace

import numpy as np
import pytest

from stemserve.kernels.layout import int32
from stemserve.kernels.pricing.engine_cost import (
    BlockEngine,
    Cost,
    CostTableError,
    TileEngine,
    causal_tile_tokens,
)
from stemserve.kernels.strategy import Part

ENGINE = TileEngine(
    host_seconds=2e-5,
    launch_seconds=4e-6,
    tile_rows=64,
    lanes=2,
    slots=8,
    splits=False,
    tile_tokens=16.0,
    token_seconds=1e-9,
)


def path_tokens(part: Part, engine: TileEngine = ENGINE) -> float:
    """Tokens of the busiest slot, with what tiles cost beside them."""
    path = engine.path(part)
    return path.tokens + path.tiles * engine.tile_tokens


def blocks(*sizes: tuple[int, int], causal: bool = False) -> Part:
    rows, tokens = zip(*sizes, strict=True)
    return Part(engine="fast", rows=int32(rows), kv_tokens=int32(tokens), causal=causal)


def test_equal_tiles_take_whole_waves() -> None:
    one_wave = blocks(*[(64, 1000)] * 4)
    assert path_tokens(one_wave) == 1016
    assert path_tokens(blocks(*[(64, 1000)] * 5)) == 2 * 1016
    assert path_tokens(blocks((256, 1000))) == 1016


def test_rows_fill_whole_tiles() -> None:
    assert path_tokens(blocks((1, 500))) == path_tokens(blocks((64, 500)))


def test_nothing_ends_before_its_longest_tile() -> None:
    assert path_tokens(blocks((1, 5000), (1, 8))) == 5016


def test_an_engine_that_splits_spreads_a_tile_over_all_slots() -> None:
    splitting = replace(ENGINE, splits=True)
    assert path_tokens(blocks((1, 5000)), splitting) == pytest.approx(2 * 5000 / 8 + 16)
    assert path_tokens(blocks((1, 100)), splitting) == 116  # not worth dividing
    assert path_tokens(blocks(*[(1, 100)] * 5), splitting) == 2 * 116


def test_what_is_divided_is_merged() -> None:
    splitting = replace(ENGINE, splits=True, split_seconds=3e-6, part_seconds=1e-8)
    whole = replace(ENGINE, splits=True)
    divided = blocks((10, 4000))  # 2 tiles for 8 slots: in 4 parts each
    more = splitting.cost(divided).device_seconds - whole.cost(divided).device_seconds
    assert more == pytest.approx(3e-6 + 4 * 10 * 1e-8)
    short = blocks((10, 100))
    assert splitting.cost(short) == whole.cost(short)


def test_slots_end_a_share_of_a_tile_apart() -> None:
    uneven = blocks(*[(1, 1000), (1, 500)] * 8)
    even_share = 32 / 8 * (750 + 16)
    assert path_tokens(uneven) == pytest.approx(even_share + 766 / 2)
    assert path_tokens(uneven, replace(ENGINE, tail=0.0)) == pytest.approx(even_share)


def test_rows_are_read_and_written() -> None:
    part = blocks((100, 50), (28, 50))
    more = replace(ENGINE, row_seconds=1e-9).cost(part)
    assert more.device_seconds == pytest.approx(ENGINE.cost(part).device_seconds + 128e-9)


@pytest.mark.parametrize("seed", range(5))
def test_causal_tiles_read_up_to_their_last_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int32(rng.integers(1, 400, 20))
    tokens = int32(rows + rng.integers(0, 100, 20))
    expected = [
        sum(t - r + min(start + 64, r) for start in range(0, r, 64))
        for r, t in zip(rows.tolist(), tokens.tolist(), strict=True)
    ]
    np.testing.assert_allclose(causal_tile_tokens(rows, tokens, 64), expected)


def test_a_long_triangle_costs_half_its_rectangle() -> None:
    size = (6400, 6400)
    triangle = path_tokens(blocks(size, causal=True))
    assert triangle / path_tokens(blocks(size)) == pytest.approx(0.5, abs=0.03)


def test_copies_have_tokens_and_no_rows() -> None:
    splitting = replace(ENGINE, splits=True, tile_tokens=0.0)
    assert path_tokens(blocks((0, 800)), splitting) == pytest.approx(2 * 800 / 8)


def test_no_blocks_cost_a_launch() -> None:
    cost = ENGINE.cost(Part(engine="fast", rows=int32([]), kv_tokens=int32([])))
    assert cost == Cost(ENGINE.host_seconds, ENGINE.launch_seconds)


def test_costs_add_up_by_host_and_device() -> None:
    assert Cost(1.0, 5.0) + Cost(3.0, 1.0) == Cost(4.0, 6.0)
    assert Cost(1.0, 5.0).seconds == 5.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_rows": 0}, "at least 1"),
        ({"launch_seconds": -1e-6}, "negative"),
        ({"token_seconds": 0.0}, "positive"),
        ({"token_seconds": float("nan")}, "finite"),
    ],
)
def test_an_impossible_engine_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(CostTableError, match=message):
        replace(ENGINE, **change)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (1,)}, "rows must be"),
        ({"kv_tokens": (8, 4)}, "kv_tokens must be"),
        ({"seconds": ((1.0,), (1.0,))}, "a value a token count"),
        ({"seconds": ((1.0, float("nan")), (1.0, 1.0))}, "finite"),
        ({"launch_seconds": 0.0}, "positive"),
        ({"tile_rows": 0}, "tile_rows"),
    ],
)
def test_an_impossible_grid_is_refused(change: dict[str, object], message: str) -> None:
    grid = BlockEngine(
        launch_seconds=1e-5,
        tile_rows=32,
        rows=(1, 8),
        kv_tokens=(1, 8),
        seconds=((1.0, 2.0), (3.0, 4.0)),
    )
    with pytest.raises(CostTableError, match=message):
        replace(grid, **change)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
