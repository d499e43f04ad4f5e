import math
from typing import Any

import pytest
from kernel_summary import (
    SUMMARY_KEYS,
    best_peer,
    calibration,
    details,
    engine_us,
    geometric,
    geometric_regret,
    over_floor,
    peer_ratios,
    plan_ms,
    regret,
    summary,
)

Row = dict[str, Any]


def tree_row(floor_us: float, codec_us: float | None, **peers: float) -> Row:
    engines: Row = {
        name: {"us": us, "cold_us": 2 * us, "error": 1e-4} for name, us in peers.items()
    }
    engines["codec"] = {"wrong": True} if codec_us is None else {"us": codec_us, "error": 1e-4}
    return {"tree": "t", "floor_us": floor_us, "engines": engines, "regret": 0.0}


def shape(prefix: int, item: int, items: int, times: dict[str, float], chosen: str) -> Row:
    strategies = {name: {"us": us, "predicted_us": us * 2} for name, us in times.items()}
    return {
        "prefix": prefix,
        "item": item,
        "items": items,
        "grid": True,
        "flops": 275e9,
        "chosen": chosen,
        "regret": regret(times, chosen, 3.0),
        "strategies": strategies,
    }


def test_the_summary_has_the_keys_that_are_promised_and_no_others() -> None:
    empty = summary(table=[], trees=[], peers=[], shapes=[], plans=[])
    assert tuple(empty) == SUMMARY_KEYS
    assert set(empty.values()) == {None}


def test_a_floor_below_20_us_is_in_no_mean_over_floors() -> None:
    rows = [tree_row(20.0, 30.0), tree_row(100.0, 100.0), tree_row(19.9, 400.0)]
    assert over_floor(rows) == pytest.approx(math.sqrt(1.5))


def test_a_wrong_engine_is_in_no_ratio() -> None:
    rows = [tree_row(50.0, None, fa3=100.0), tree_row(50.0, 50.0, fa3=100.0)]
    rows[1]["engines"]["xqa"] = {"wrong": True, "error": 0.5}
    assert engine_us(rows[0], "codec") is None
    assert over_floor(rows) == 1.0
    assert peer_ratios(rows, ["fa3", "xqa"]) == [2.0]
    assert best_peer(rows[1], ["xqa"]) is None


def test_ratios_are_peer_over_ours_and_the_worst_is_of_all_trees() -> None:
    table = [tree_row(50.0, 100.0, fa3=300.0, fi_decode=200.0)]
    trees = [tree_row(5.0, 10.0, fa3=80.0, fi_decode=9.0)]
    figures = summary(table=table, trees=trees, peers=["fa3", "fi_decode"], shapes=[], plans=[])
    assert figures["codec_vs_floor"] == 2.0
    assert figures["codec_vs_floor_trees"] is None
    assert figures["codec_vs_best_peer"] == 2.0
    assert figures["codec_vs_fa3"] == 3.0
    assert figures["codec_worst_vs_best_peer"] == 0.9


def test_regret_is_a_fraction_of_the_best() -> None:
    times = {"ragged": 110.0, "cascade": 100.0}
    assert regret(times, "ragged") == pytest.approx(0.1)
    assert regret(times, "cascade") == 0.0
    assert regret(times, "naive") is None


def test_less_than_3_us_is_no_regret() -> None:
    assert regret({"a": 32.9, "b": 30.0}, "a", 3.0) == 0.0
    assert regret({"a": 33.0, "b": 30.0}, "a", 3.0) == pytest.approx(0.1)


def test_the_mean_regret_is_geometric() -> None:
    assert geometric_regret([0.0, 0.21]) == pytest.approx(0.1)
    assert geometric_regret([]) is None
    assert geometric([]) is None


def test_figures_of_the_survey_come_from_its_own_rows() -> None:
    drawn = shape(8196, 4, 32, {"ragged": 1.0}, "ragged") | {"grid": False}
    shapes = [
        drawn,
        shape(8196, 4, 32, {"ragged": 900.0, "codec": 500.0}, "ragged")
        | {"full_prompts_us": 20000.0},
        shape(8196, 256, 32, {"ragged": 1700.0, "codec": 1500.0}, "codec"),
        shape(8196, 0, 0, {"ragged": 550.0, "naive": 500.0}, "ragged"),
    ]
    figures = summary(table=[], trees=[], peers=[], shapes=shapes, plans=[])
    assert figures["naive_over_best_p8196_s4_m32"] == 40.0
    assert figures["best_ms_p8196_s256_m32"] == 1.5
    assert figures["causal_prefill_tflops_8196"] == 500.0  # of the choice, not of the best
    assert figures["prefill_regret_max"] == 0.8
    assert figures["prefill_regret_geomean"] == pytest.approx((1.8 * 1.1) ** 0.25 - 1, rel=1e-4)


def test_the_slowest_plan_of_a_batch_size_counts() -> None:
    plans = [{"requests": n, "plan_ms": ms} for n, ms in ((64, 0.1), (64, 0.3), (1024, 0.9))]
    assert plan_ms(plans, 64) == 0.3
    assert plan_ms(plans, 1024) == 0.9
    assert plan_ms(plans, 16) is None


def test_calibration_compares_what_was_predicted_with_what_was_timed() -> None:
    row = tree_row(50.0, 100.0) | {"predicted_us": {"codec": 50.0, "paged": 9.0, "cascade": "no"}}
    found = calibration([row], [], [shape(1, 1, 1, {"ragged": 10.0}, "ragged")])
    assert [(entry["phase"], entry["strategy"]) for entry in found] == [
        ("decode", "codec"),
        ("prefill", "ragged"),
    ]
    assert found[0]["measured_over_predicted"] == 2.0
    assert found[1]["measured_over_predicted"] == 0.5
    assert found[1]["typical_error"] == found[1]["worst_error"] == 1.0


def test_details_tell_warm_from_cold() -> None:
    row = tree_row(50.0, 100.0, fa3=300.0)
    row["engines"]["codec"]["cold_us"] = 150.0
    figures = details([row], [], ["fa3"])
    assert figures["table_warm_vs_fa3"] == 3.0
    assert figures["table_cold_vs_fa3"] == 4.0
    assert figures["table_cold_vs_floor"] == 3.0
    assert figures["trees_warm_vs_floor"] is None
