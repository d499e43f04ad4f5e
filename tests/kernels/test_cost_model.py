"""Estimates of blocks, of work and of whole strategies."""

from dataclasses import replace

import numpy as np
import pytest
from tests.kernels.forests import head_shape, items_over

from stemserve.kernels.layout import int32
from stemserve.kernels.pricing.cost_correction import (
    Corrections,
    StrategyCorrection,
    layout_features,
)
from stemserve.kernels.pricing.cost_model import CostTable, correction_key
from stemserve.kernels.pricing.engine_cost import CostTableError
from stemserve.kernels.strategy import TORCH, Kernel, Part, Phase, Work


def test_grid_points_are_returned_as_measured(costs: CostTable) -> None:
    engine = costs.torch_engine
    rows, tokens = np.meshgrid(engine.rows, engine.kv_tokens, indexing="ij")
    estimate = costs.block_seconds(int32(rows), int32(tokens))
    np.testing.assert_allclose(estimate, np.array(engine.seconds), rtol=1e-9)


def test_between_grid_points_the_estimate_is_bilinear_in_logarithms(costs: CostTable) -> None:
    engine = costs.torch_engine
    corners = np.array(engine.seconds)[4:6, 6:8]
    rows = round((engine.rows[4] * engine.rows[5]) ** 0.5)
    part = np.log(rows / engine.rows[4]) / np.log(engine.rows[5] / engine.rows[4])
    expected = np.exp(np.log(corners[0, 0]) * (1 - part) + np.log(corners[1, 0]) * part)
    assert costs.block_seconds(rows, engine.kv_tokens[6]) == pytest.approx(expected)


def test_beyond_the_grid_the_last_slope_goes_on(costs: CostTable) -> None:
    engine = costs.torch_engine
    line = engine.seconds[3]
    twice = line[-1] * line[-1] / line[-2]
    assert costs.block_seconds(engine.rows[3], 2 * engine.kv_tokens[-1]) == pytest.approx(twice)


def test_nothing_costs_nothing(costs: CostTable) -> None:
    assert costs.block_seconds(int32([0, 5]), int32([7, 0])).tolist() == [0, 0]


def torch_work(*, causal: bool = False, launches: int = 1) -> Work:
    part = Part(
        engine=TORCH,
        rows=int32([4, 160]),
        kv_tokens=int32([1024, 160]),
        causal=causal,
        launches=launches,
    )
    return Work(parts=(part,))


def test_work_of_a_cpu_costs_its_launches_and_its_blocks(costs: CostTable) -> None:
    blocks = costs.block_seconds(4, 1024) + costs.block_seconds(160, 160)
    cost = costs.work_cost(torch_work(launches=3))
    assert cost.seconds == pytest.approx(3 * costs.launch_seconds + blocks)


def test_on_a_gpu_host_and_device_work_beside_each_other(costs: CostTable) -> None:
    blocks = costs.block_seconds(4, 1024) + costs.block_seconds(160, 160)
    cost = replace(costs, device="some-gpu").work_cost(torch_work(launches=3))
    assert cost.host_seconds == pytest.approx(3 * costs.launch_seconds)
    assert cost.device_seconds == pytest.approx(float(blocks))
    assert cost.seconds == max(cost.host_seconds, cost.device_seconds)


def test_a_causal_block_costs_what_its_tiles_read(costs: CostTable) -> None:
    tiles = 160 // costs.torch_engine.tile_rows
    causal = costs.work_cost(torch_work(causal=True)).seconds
    expected = costs.launch_seconds + costs.block_seconds(4, 1024)
    expected += costs.block_seconds(160, 160) * (tiles + 1) / (2 * tiles)
    assert causal == pytest.approx(float(expected))


def test_more_heads_cost_in_proportion(costs: CostTable) -> None:
    scaled = costs.scaled(head_shape(18, 6, 128))
    assert scaled.block_seconds(5, 300) == pytest.approx(4 * costs.block_seconds(5, 300))
    assert scaled.launch_seconds == costs.launch_seconds
    assert (scaled.query_heads, scaled.kv_heads, scaled.head_dim) == (18, 6, 128)


def test_a_correction_holds_where_it_was_measured_and_near(costs: CostTable) -> None:
    layout, work = items_over(1000, [8] * 16), torch_work()
    key = correction_key(Kernel.RAGGED, work)
    correction = Corrections(
        shapes=(tuple(layout_features(layout).tolist()), (0.0, 1.0, 1.0, 0.0, 1.0), (0.0,) * 5),
        strategies={key: StrategyCorrection(host_seconds=0.0, device=(0.3, None, 0.1))},
    )
    table = replace(costs, corrections={Phase.PREFILL: correction})
    plain = table.work_cost(work).seconds

    def corrected(kernel: Kernel, prefix: int) -> float:
        other = items_over(prefix, [8] * 16)
        return table.strategy_cost(Phase.PREFILL, kernel, other, work).seconds

    assert corrected(Kernel.RAGGED, 1000) == pytest.approx(plain * np.exp(0.3), rel=0.01)
    assert plain * np.exp(0.2) < corrected(Kernel.RAGGED, 2000) < plain * np.exp(0.3)
    assert corrected(Kernel.RAGGED, 1000 << 10) == pytest.approx(plain * np.exp(0.2), rel=0.01)
    assert corrected(Kernel.NAIVE, 1000) == plain
    decode = table.strategy_cost(Phase.DECODE, Kernel.RAGGED, layout, work)
    assert decode.seconds == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kv_heads": 2}, "multiple"), ({"head_dim": 0}, "at least 1"), ({"engines": {}}, "torch")],
)
def test_a_wrong_table_is_refused(
    change: dict[str, int | dict[str, int]], message: str, costs: CostTable
) -> None:
    with pytest.raises(CostTableError, match=message):
        replace(costs, **change)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
