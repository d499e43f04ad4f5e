"""A calibration on a small grid, and the fit of engines to times that a model made."""

from dataclasses import replace
from importlib.metadata import version
from itertools import islice

import numpy as np
import pytest
import torch
from tests.kernels.forests import head_shape, items_over
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout, int32
from stemserve.kernels.pricing.calibration import Plan, fitted_table, measure_cost_table
from stemserve.kernels.pricing.calibration_blocks import Grid
from stemserve.kernels.pricing.calibration_layouts import (
    DecodeLimits,
    ScoreLimits,
    decode_layouts,
    score_shapes,
)
from stemserve.kernels.pricing.calibration_strategies import Extent, SteeredCosts, StrategyMeter
from stemserve.kernels.pricing.cost_correction import layout_features
from stemserve.kernels.pricing.cost_model import Costs, CostTable, correction_key
from stemserve.kernels.pricing.cost_table_file import parse_tables, tables_json
from stemserve.kernels.pricing.engine_cost import TileEngine
from stemserve.kernels.pricing.engine_fit import Measurement, relative_fit
from stemserve.kernels.pricing.stopwatch import Bench, StrategyBench
from stemserve.kernels.strategy import Kernel, Part, Phase, Work

SMALL = Plan(
    grid=Grid(rows=(1, 8), kv_tokens=(4, 64), passes=2),
    extent=Extent(
        score=ScoreLimits(prefix=64, item_rows=4, items=4, rows=16),
        score_layouts=3,
        decode=DecodeLimits(requests=4, node_tokens=64, tokens=256),
        decode_layouts=2,
        longest_s=1.0,
        budget_s=60.0,
    ),
)
ENGINE = TileEngine(
    host_seconds=2e-5,
    launch_seconds=4e-6,
    tile_rows=128,
    lanes=16,
    slots=132,
    splits=False,
    tile_tokens=256.0,
    token_seconds=2e-9,
)


def test_a_calibration_is_a_valid_table_of_its_device() -> None:
    reports: list[tuple[int, int]] = []
    table = measure_cost_table(
        head_shape(4, 2, 16),
        torch.device("cpu"),
        torch.float32,
        lambda done, total: reports.append((done, total)),
        SMALL,
    )
    assert (table.device, table.dtype, table.torch_engine.rows) == ("cpu", "float32", (1, 8))
    assert table.libraries["torch"] == version("torch")
    assert parse_tables(tables_json([table])) == (table,)
    assert reports == [(done, 13) for done in range(14)]
    assert set(table.corrections) == set(Phase)
    assert f"{Kernel.NAIVE}:torch" in table.corrections[Phase.PREFILL].strategies
    assert f"{Kernel.CODEC}:torch" in table.corrections[Phase.DECODE].strategies


def made_up(count: int, slowdown: float) -> list[Measurement]:
    """One engine that takes the blocks of a layout at once, and some time beside it."""
    measured: list[Measurement] = []
    for shape in islice(score_shapes(ScoreLimits()), count):
        layout = shape.layout(np.random.default_rng(0))
        tokens = layout.chain_tokens + np.where(layout.segment_is_item, layout.segment_rows, 0)
        part = Part(engine="fast", rows=layout.segment_rows, kv_tokens=int32(tokens), causal=True)
        work = Work(parts=(part,))
        cost = ENGINE.cost(part)
        measured.append(
            Measurement(
                phase=Phase.PREFILL,
                kernel=Kernel.RAGGED,
                features=tuple(layout_features(layout).tolist()),
                work=work,
                cost=cost._replace(device_seconds=cost.device_seconds * slowdown),
            )
        )
    return measured


def test_the_engine_that_made_the_times_is_found_again(costs: CostTable) -> None:
    table = replace(costs, device="made-up", query_heads=16, kv_heads=8, head_dim=128)
    found = fitted_table(table, made_up(60, 1.0), ENGINE.slots).engines["fast"]
    assert isinstance(found, TileEngine)
    assert (found.tile_rows, found.lanes, found.splits) == (128, 16, False)
    assert found.token_seconds == pytest.approx(ENGINE.token_seconds, rel=1e-3)
    assert found.launch_seconds == pytest.approx(ENGINE.launch_seconds, rel=1e-2)
    assert found.host_seconds == pytest.approx(ENGINE.host_seconds)


def test_what_engines_do_not_explain_is_corrected_between_the_measured_shapes(
    costs: CostTable,
) -> None:
    table = replace(costs, device="made-up", query_heads=16, kv_heads=8, head_dim=128)
    measured = made_up(160, 1.0)
    for number, m in enumerate(measured):  # slower the more items
        slower = m.cost.device_seconds * (1 + 0.1 * m.features[0])
        measured[number] = replace(m, cost=m.cost._replace(device_seconds=slower))
    fitted = fitted_table(table, measured[:140], ENGINE.slots)
    corrections = fitted.corrections[Phase.PREFILL]
    errors = [
        corrections.corrected(
            correction_key(m.kernel, m.work), np.array(m.features), fitted.work_cost(m.work)
        ).device_seconds
        / m.cost.device_seconds
        - 1
        for m in measured[140:]
    ]
    assert np.median(np.abs(errors)) < 0.05


def test_a_fit_has_no_negative_times() -> None:
    columns = np.array([[1.0, 2.0], [1.0, 1.0], [1.0, 3.0]])
    fitted = relative_fit(columns, columns @ np.array([4.0, -0.5]))
    assert (fitted >= 0).all()
    np.testing.assert_allclose(relative_fit(columns, columns @ [1.0, 2.0]), [1.0, 2.0])


def test_layouts_to_measure_stay_within_their_limits() -> None:
    for layout in islice(decode_layouts(DecodeLimits(tokens=10_000)), 50):
        assert layout.node_tokens.sum() <= 10_000
        assert (layout.segment_rows == 1).all()
        assert (layout.node_tokens[layout.node_parent[layout.node_parent >= 0]] % 16 == 0).all()
    for shape in islice(score_shapes(ScoreLimits(rows=100)), 50):
        assert 1 <= shape.item_rows * shape.items <= 100
        assert shape.layout(np.random.default_rng(0)).num_rows >= shape.item_rows * shape.items


class TwoWays:
    """A strategy with a choice of engines, which plans what costs less."""

    kernel = Kernel.RAGGED
    phase = Phase.PREFILL

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def refusal(self, layout: AttentionLayout) -> str | None:
        return None

    def work(self, layout: AttentionLayout) -> Work:
        def seconds(work: Work) -> float:
            return self._costs.strategy_cost(self.phase, self.kernel, layout, work).seconds

        parts = [
            Part(engine=name, rows=layout.segment_rows, kv_tokens=layout.chain_tokens)
            for name in ("slow", "fast")
        ]
        return min((Work(parts=(part,)) for part in parts), key=seconds)

    def plan(self, layout: AttentionLayout) -> Work:
        return self.work(layout)

    def run(self, plan: Work, q: Tensor, kv: LayerKV) -> AttentionState:
        return AttentionState(q, torch.zeros(q.shape[:2]))


def test_a_strategy_that_chooses_its_engines_is_measured_with_each(costs: CostTable) -> None:
    steered = SteeredCosts(costs)
    bench = Bench(shape=head_shape(2, 1, 8), device=torch.device("cpu"), dtype=torch.float32)
    meter = StrategyMeter(
        rig=StrategyBench(bench, pages=4, page_size=16, rows=32),
        strategies=[TwoWays(steered)],
        costs=steered,
        estimate=lambda work: 1e-6,
    )
    measured = list(meter.measure(Phase.PREFILL, items_over(16, [2, 3]), longest_s=2.0))
    assert [m.work.parts[0].engine for m in measured] == ["slow", "fast"]
    assert all(m.cost.seconds > 0 for m in measured)


def test_what_is_estimated_at_many_times_the_best_is_not_measured(costs: CostTable) -> None:
    steered = SteeredCosts(costs)
    bench = Bench(shape=head_shape(2, 1, 8), device=torch.device("cpu"), dtype=torch.float32)
    meter = StrategyMeter(
        rig=StrategyBench(bench, pages=4, page_size=16, rows=32),
        strategies=[TwoWays(steered)],
        costs=steered,
        estimate=lambda work: 6e-6 if work.parts[0].engine == "slow" else 1e-6,
    )
    measured = list(meter.measure(Phase.PREFILL, items_over(16, [2, 3]), longest_s=99.0))
    assert [m.work.parts[0].engine for m in measured] == ["fast"]
