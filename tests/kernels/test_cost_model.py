"""Estimates between and beyond grid points; refusals of wrong tables."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.kernels.forests import head_shape

from stemserve.kernels.cost_model import CostTable, CostTableError, shipped_cost_table
from stemserve.kernels.layout import int32
from stemserve.kernels.strategy import TORCH, Part, Work


def test_grid_points_are_returned_as_measured(costs: CostTable) -> None:
    rows, tokens = np.meshgrid(costs.rows, costs.kv_tokens, indexing="ij")
    estimate = costs.block_seconds(int32(rows), int32(tokens))
    np.testing.assert_allclose(estimate, np.array(costs.seconds), rtol=1e-9)


def test_between_grid_points_the_estimate_is_bilinear_in_logarithms(costs: CostTable) -> None:
    corners = np.array(costs.seconds)[4:6, 6:8]
    rows = round((costs.rows[4] * costs.rows[5]) ** 0.5)
    part = np.log(rows / costs.rows[4]) / np.log(costs.rows[5] / costs.rows[4])
    expected = np.exp(np.log(corners[0, 0]) * (1 - part) + np.log(corners[1, 0]) * part)
    assert costs.block_seconds(rows, costs.kv_tokens[6]) == pytest.approx(expected)


def test_beyond_the_grid_the_last_slope_goes_on(costs: CostTable) -> None:
    line = costs.seconds[3]
    twice = line[-1] * line[-1] / line[-2]
    assert costs.block_seconds(costs.rows[3], 2 * costs.kv_tokens[-1]) == pytest.approx(twice)


def test_nothing_costs_nothing(costs: CostTable) -> None:
    assert costs.block_seconds(int32([0, 5]), int32([7, 0])).tolist() == [0, 0]


def test_work_costs_its_launches_and_its_blocks(costs: CostTable) -> None:
    part = Part(engine=TORCH, rows=int32([4, 16]), kv_tokens=int32([1024, 256]), launches=3)
    work = Work(parts=(part,))
    blocks = costs.block_seconds(4, 1024) + costs.block_seconds(16, 256)
    assert costs.work_seconds(work) == pytest.approx(3 * costs.launch_seconds + blocks)


def test_more_heads_cost_in_proportion(costs: CostTable) -> None:
    scaled = costs.scaled(head_shape(18, 6, 128))
    assert scaled.block_seconds(5, 300) == pytest.approx(4 * costs.block_seconds(5, 300))
    assert scaled.launch_seconds == costs.launch_seconds
    assert (scaled.query_heads, scaled.kv_heads, scaled.head_dim) == (18, 6, 128)


def test_json_returns_the_same_table(costs: CostTable) -> None:
    assert CostTable.from_json(costs.to_json()) == costs


def test_an_unknown_device_has_no_shipped_table() -> None:
    assert shipped_cost_table("abacus") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 0}, "format 0"),
        ({"rows": [1]}, "rows must be"),
        ({"kv_tokens": [8, 4]}, "kv_tokens must be"),
        ({"seconds": [[1.0]]}, "a value a token count"),
        ({"launch_seconds": 0.0}, "positive"),
        ({"kv_heads": 2}, "multiple"),
        ({"head_dim": 0}, "at least 1"),
        ({"rows": 3}, "wrong kind"),
        ({"colour": "red"}, "exactly the entries"),
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, Any], message: str, costs: CostTable) -> None:
    entries = json.loads(costs.to_json()) | change
    with pytest.raises(CostTableError, match=message):
        CostTable.from_json(json.dumps(entries))


@pytest.mark.parametrize("text", ["", "[1, 2]", "{"])
def test_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(CostTableError):
        CostTable.from_json(text)


def test_a_time_that_is_no_number_is_refused(costs: CostTable) -> None:
    lines = [list(line) for line in costs.seconds]
    lines[0][0] = float("nan")
    with pytest.raises(CostTableError, match="finite"):
        replace(costs, seconds=tuple(map(tuple, lines)))
