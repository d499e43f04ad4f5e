"""The figures of a run: ratios of tree decode to floor and peers, and what a wrong choice costs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]  # of a tree or a shape, as in kernels.json

LEAST_FLOOR_US = 20  # shorter calls are mostly launches: in no mean over floors
NO_DIFFERENCE_US = 3.0  # between two ways of a prefill
TFLOPS_SHAPE = (8196, 0, 0)  # one prompt by itself
SUMMARY_KEYS = (
    "codec_vs_floor",
    "codec_vs_floor_trees",
    "codec_vs_best_peer",
    "codec_vs_fa3",
    "codec_worst_vs_best_peer",
    "prefill_regret_max",
    "prefill_regret_geomean",
    "decode_regret_max",
    "causal_prefill_tflops_8196",
    "naive_over_best_p8196_s4_m32",
    "best_ms_p8196_s256_m32",
    "plan_ms_64",
    "plan_ms_1024",
)


def geometric(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def engine_us(row: Row, engine: str, kind: str = "us") -> float | None:
    """None where the engine did not run, was wrong or was not asked to."""
    found: Any = row["engines"].get(engine, {}).get(kind)
    return None if found is None else float(found)


def over_floor(rows: Sequence[Row], kind: str = "us") -> float | None:
    """Ours over the floor, geometric mean over floors of 20 us and more."""
    return geometric(
        us / row["floor_us"]
        for row in rows
        if row["floor_us"] >= LEAST_FLOOR_US and (us := engine_us(row, "codec", kind)) is not None
    )


def best_peer(row: Row, peers: Sequence[str], kind: str = "us") -> tuple[str, float] | None:
    times = [(us, name) for name in peers if (us := engine_us(row, name, kind)) is not None]
    return (min(times)[1], min(times)[0]) if times else None


def peer_ratios(rows: Sequence[Row], peers: Sequence[str], kind: str = "us") -> list[float]:
    """Best peer over ours, a number a tree that both ran."""
    ratios: list[float] = []
    for row in rows:
        ours, best = engine_us(row, "codec", kind), best_peer(row, peers, kind)
        if ours is not None and best is not None:
            ratios.append(best[1] / ours)
    return ratios


def regret(times_us: dict[str, float], chosen: str, no_difference_us: float = 0.0) -> float | None:
    """Chosen over best, minus 1; 0 where they differ by less than what counts."""
    if chosen not in times_us:
        return None
    best = min(times_us.values())
    loss = times_us[chosen] - best
    return 0.0 if loss < no_difference_us else loss / best


def geometric_regret(regrets: Sequence[float]) -> float | None:
    mean = geometric(1 + value for value in regrets)
    return None if mean is None else mean - 1


def summary(
    *,
    table: Sequence[Row],
    trees: Sequence[Row],
    peers: Sequence[str],
    shapes: Sequence[Row],
    plans: Sequence[Row],
) -> dict[str, float | None]:
    """Exactly SUMMARY_KEYS; None where a run did not measure what a figure needs."""
    known = [value for row in shapes if (value := row["regret"]) is not None]
    choices = [value for row in (*table, *trees) if (value := row.get("regret")) is not None]
    short, long = shape_row(shapes, 8196, 4, 32), shape_row(shapes, 8196, 256, 32)
    figures: dict[str, float | None] = {
        "codec_vs_floor": over_floor(table),
        "codec_vs_floor_trees": over_floor(trees),
        "codec_vs_best_peer": geometric(peer_ratios(table, peers)),
        "codec_vs_fa3": geometric(peer_ratios(table, ["fa3"])),
        "codec_worst_vs_best_peer": min(peer_ratios([*table, *trees], peers), default=None),
        "prefill_regret_max": max(known, default=None),
        "prefill_regret_geomean": geometric_regret(known),
        "decode_regret_max": max(choices, default=None),
        "causal_prefill_tflops_8196": causal_tflops(shapes),
        "naive_over_best_p8196_s4_m32": naive_over_best(short),
        "best_ms_p8196_s256_m32": best_ms(long),
        "plan_ms_64": plan_ms(plans, 64),
        "plan_ms_1024": plan_ms(plans, 1024),
    }
    return {key: rounded(figures[key]) for key in SUMMARY_KEYS}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def shape_row(shapes: Sequence[Row], prefix: int, item: int, items: int) -> Row | None:
    """The row of the survey's grid; random shapes may be alike."""
    for row in shapes:
        if row["grid"] and (row["prefix"], row["item"], row["items"]) == (prefix, item, items):
            return row
    return None


def strategy_times(row: Row) -> dict[str, float]:
    """Microseconds of the strategies that were timed: what dispatch can choose from."""
    return {name: float(found["us"]) for name, found in row["strategies"].items() if "us" in found}


def causal_tflops(shapes: Sequence[Row]) -> float | None:
    """Of the strategy that dispatch takes for one prompt of 8196 tokens, nothing cached."""
    row = shape_row(shapes, *TFLOPS_SHAPE)
    us = strategy_times(row).get(row["chosen"]) if row is not None else None
    return None if row is None or us is None else float(row["flops"]) / us / 1e6


def naive_over_best(row: Row | None) -> float | None:
    """Full prompts, each by itself, over the best strategy."""
    if row is None or not strategy_times(row) or row.get("full_prompts_us") is None:
        return None
    return float(row["full_prompts_us"]) / min(strategy_times(row).values())


def best_ms(row: Row | None) -> float | None:
    return min(strategy_times(row).values()) / 1e3 if row and strategy_times(row) else None


def plan_ms(plans: Sequence[Row], requests: int) -> float | None:
    """The slowest plan of so many requests."""
    return max((row["plan_ms"] for row in plans if row["requests"] == requests), default=None)


def calibration(table: Sequence[Row], trees: Sequence[Row], shapes: Sequence[Row]) -> list[Row]:
    """Measured over predicted time, for each strategy of each phase."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in (*table, *trees):
        for name, predicted in row.get("predicted_us", {}).items():
            us = engine_us(row, name)
            if us is not None and not isinstance(predicted, str):
                ratios.setdefault(("decode", name), []).append(us / predicted)
    for row in shapes:
        for name, found in row["strategies"].items():
            if "us" in found:
                ratio = float(found["us"]) / float(found["predicted_us"])
                ratios.setdefault(("prefill", name), []).append(ratio)
    return [
        {
            "phase": phase,
            "strategy": name,
            "count": len(values),
            "measured_over_predicted": rounded(geometric(values)),
            "typical_error": rounded(_typical_factor(values) - 1),
            "worst_error": rounded(max(max(value, 1 / value) for value in values) - 1),
        }
        for (phase, name), values in sorted(ratios.items())
    ]


def _typical_factor(ratios: Sequence[float]) -> float:
    """Geometric mean of how far each is off, up or down."""
    return math.exp(sum(abs(math.log(value)) for value in ratios) / len(ratios))


def details(
    table: Sequence[Row], trees: Sequence[Row], peers: Sequence[str]
) -> dict[str, float | None]:
    """The same ratios with a cold L2 and for each set of trees."""
    figures: dict[str, float | None] = {}
    for label, rows in (("table", table), ("trees", trees)):
        for kind in ("us", "cold_us"):
            name = f"{label}_{'warm' if kind == 'us' else 'cold'}"
            figures[f"{name}_vs_floor"] = over_floor(rows, kind)
            figures[f"{name}_vs_best_peer"] = geometric(peer_ratios(rows, peers, kind))
            figures[f"{name}_worst_vs_best_peer"] = min(
                peer_ratios(rows, peers, kind), default=None
            )
            for peer in peers:
                figures[f"{name}_vs_{peer}"] = geometric(peer_ratios(rows, [peer], kind))
    return {name: rounded(value) for name, value in figures.items()}
