"""JSON of cost tables: round trips, refusals with a remedy, the table of a model's heads."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.kernels.forests import head_shape

from stemserve.kernels.pricing.cost_correction import FEATURES, Corrections, StrategyCorrection
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.cost_table_file import (
    of_dtype,
    parse_tables,
    shipped_cost_tables,
    table_for_heads,
    tables_json,
)
from stemserve.kernels.pricing.engine_cost import Cost, CostTableError, TileEngine
from stemserve.kernels.strategy import Phase

ENGINE = TileEngine(
    host_seconds=2e-5,
    launch_seconds=4e-6,
    tile_rows=64,
    lanes=9,
    slots=132,
    splits=False,
    tile_tokens=16.0,
    token_seconds=1e-9,
)


@pytest.fixture
def full(costs: CostTable) -> CostTable:
    """Every kind of entry."""
    correction = StrategyCorrection(host_seconds=1e-5, device=(-0.2, None))
    corrections = Corrections(
        shapes=((1.0, 2.0, 3.0, 4.0, 0.5), (0.0, 0.0, 0.0, 0.0, 1.0)),
        strategies={"ragged:fast": correction},
    )
    return replace(
        costs,
        engines={**costs.engines, "fast": ENGINE},
        corrections={Phase.PREFILL: corrections},
    )


def test_json_returns_the_same_tables(full: CostTable, costs: CostTable) -> None:
    assert parse_tables(tables_json([full, costs])) == (full, costs)


def test_an_unknown_device_has_no_shipped_table() -> None:
    assert shipped_cost_tables("abacus") == ()


def test_an_old_format_is_refused_with_the_remedy() -> None:
    old = json.dumps({"format_version": 1, "device": "cpu", "seconds": [[1.0]]})
    with pytest.raises(CostTableError, match=r"format 1.* reads 2; run stemserve calibrate"):
        parse_tables(old)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "{}", '{"format_version": 2, "tables": []}'])
def test_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(CostTableError, match="calibrate"):
        parse_tables(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "exactly the entries"),
        ({"engines": 3}, "wrong kind"),
        ({"engines": {"torch": {"kind": "magic"}}}, "kind of an engine"),
        ({"corrections": {"sleep": {}}}, "wrong kind"),
        ({"corrections": {"prefill": {"shapes": [[1.0]], "strategies": {}}}}, "5 features"),
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, Any], message: str, full: CostTable) -> None:
    loaded = json.loads(tables_json([full]))
    loaded["tables"][0] |= change
    with pytest.raises(CostTableError, match=message):
        parse_tables(json.dumps(loaded))


def test_the_heads_that_were_measured_are_taken_as_they_are(costs: CostTable) -> None:
    other = replace(costs, query_heads=32, kv_heads=8, head_dim=128)
    assert table_for_heads([costs, other], head_shape(32, 8, 128)) is other
    assert table_for_heads([costs, other], head_shape(9, 3, 64)) is costs


def test_other_heads_are_scaled_from_the_nearest(costs: CostTable) -> None:
    wide = replace(costs, query_heads=32, kv_heads=8, head_dim=128)
    found = table_for_heads([costs, wide], head_shape(16, 4, 128))
    assert (found.query_heads, found.kv_heads, found.head_dim) == (16, 4, 128)
    assert found.block_seconds(8, 512) == pytest.approx(costs.block_seconds(8, 512) / 2)


def test_both_half_types_share_a_table(costs: CostTable) -> None:
    half = replace(costs, dtype="bfloat16")
    assert of_dtype([costs, half], "float16") == [half]
    assert of_dtype([costs, half], "float32") == [costs]
    assert of_dtype([costs, half], "float64") == []


def test_the_h200_comes_with_heads_of_three_shapes() -> None:
    tables = shipped_cost_tables("nvidia-h200")
    shapes = [(t.query_heads, t.kv_heads, t.head_dim) for t in tables]
    assert shapes == [(16, 8, 128), (32, 8, 128), (28, 4, 128)]
    assert of_dtype(tables, "bfloat16") == list(tables)


@pytest.mark.parametrize("device", ["cpu", "nvidia-h200"])
def test_shipped_corrections_are_finite_wherever_they_are_asked(device: str) -> None:
    rng = np.random.default_rng(0)
    for table in shipped_cost_tables(device):
        assert set(table.corrections) == set(Phase)
        for corrections in table.corrections.values():
            assert corrections.strategies
            for key in corrections.strategies:
                features = rng.uniform(0, 16, FEATURES)
                cost = corrections.corrected(key, features, Cost(1e-5, 1e-5))
                assert 2e-6 < cost.device_seconds < 1e-4
                assert 0 <= cost.host_seconds < 1e-3
