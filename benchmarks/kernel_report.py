"""A run's tables, as they are printed."""

from collections import Counter
from typing import Any

from division_section import FIXED, PARTS
from dram_section import savings
from kernel_tables import (
    choice_table,
    decode_table,
    engine_cell,
    facts_table,
    markdown,
    percent,
    prefill_table,
)

Result = dict[str, Any]  # kernels.json
Row = dict[str, Any]

TABLE_RULE = (
    "Decode, one layer, fp16, pages of 16, shared. ms of a CUDA-graph replay, warm L2; `cold`:"
    " calls in a graph over several KV sets. Outputs checked in float64."
)
PREFILL_RULE = (
    "Prefill, one layer, fp16. ms, mean of back-to-back eager calls; (in brackets): predicted over"
    " 10x the best, not timed. Differences under 3 us are no regret."
)


def report(result: Result) -> str:
    sections = [
        _decode("Trees of the first table", result["table"], result),
        _decode("Trees of the file", result["trees"], result),
        _missing(result),
        _choices([*result["table"], *result["trees"]]),
        _prefill(result["shapes"]),
        _calibration(result["calibration"]),
        _division(result["division"], result["division_figures"]),
        _plans(result["plans"]),
        _dram(result["dram"], result["no_dram"]),
        "## Summary\n\n" + facts_table(result["summary"]),
    ]
    return "\n\n".join(section for section in sections if section)


def _decode(title: str, rows: list[Row], result: Result) -> str:
    if not rows:
        return ""
    own = [name for name in result["strategies"] if _ran(rows, name)]
    peers = [name for name in result["peers"] if _ran(rows, name)]
    return f"## {title}\n\n{TABLE_RULE}\n\n{decode_table(rows, own, peers)}"


def _ran(rows: list[Row], engine: str) -> bool:
    return any(engine in row["engines"] for row in rows)


def _missing(result: Result) -> str:
    """What did not run, and why: nothing is left out silently."""
    lines = [f"- {name}: {why}" for name, why in result["missing_peers"].items()]
    entries = [
        (name, found)
        for row in (*result["table"], *result["trees"])
        for name, found in row["engines"].items()
    ]
    entries += [
        (f"prefill {name}", found)
        for row in result["shapes"]
        for name, found in row["strategies"].items()
    ]
    counts = Counter((name, why) for name, found in entries if (why := _why_not(found)))
    lines += [f"- {name}: {why} ({count} times)" for (name, why), count in counts.items()]
    for name in dict.fromkeys(name for name, found in entries if "wrong" in found):
        errors = [found["error"] for of, found in entries if of == name and "wrong" in found]
        lines.append(
            f"- {name}: wrong, error {min(errors):.1e} to {max(errors):.1e} ({len(errors)} times)"
        )
    lines += [f"- {count} of {section}: no time left" for section, count in result["late"].items()]
    return "## Not measured\n\n" + "\n".join(lines) if lines else ""


def _why_not(found: Row) -> str | None:
    return next((f"{word}: {found[word]}" for word in ("failed", "cannot") if word in found), None)


def _choices(rows: list[Row]) -> str:
    if not rows:
        return ""
    own = sorted({name for row in rows for name in row["predicted_us"]})
    return f"## Choice of dispatch, decode\n\n{choice_table(rows, own)}"


def _prefill(rows: list[Row]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row["strategies"]))
    return f"## Prefill\n\n{PREFILL_RULE}\n\n{prefill_table(rows, sorted(names))}"


def _calibration(rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = [
        [
            row["phase"],
            row["strategy"],
            str(row["count"]),
            f"{row['measured_over_predicted']:.2f}",
            percent(row["typical_error"]),
            percent(row["worst_error"]),
        ]
        for row in rows
    ]
    headers = ["phase", "strategy", "count", "measured / predicted", "typical error", "worst"]
    return "## Predicted against measured\n\n" + markdown(headers, lines)


def _division(rows: list[Row], figures: Row | None) -> str:
    if not rows or figures is None:
        return ""
    names = [*PARTS, *FIXED]
    lines = [[row["tree"], *(engine_cell(row, name) for name in names)] for row in rows]
    said = [
        f"- {name.replace('_', ' ')}: {value:.2f}x" if value is not None else f"- {name}: -"
        for name, value in figures.items()
        if not isinstance(value, dict)
    ]
    cost = ", ".join(
        f"{name} {value:.2f}x" for name, value in figures["fixed_split_cost"].items() if value
    )
    table = markdown(["tree", *names], lines)
    return "## Task division, ms\n\n" + "\n".join(
        [table, "", *said, f"- fixed splits cost: {cost}"]
    )


def _plans(rows: list[Row]) -> str:
    if not rows:
        return ""
    kinds = ("first_plan_ms", "plan_ms", "grow_ms")
    lines = [
        [row["tree"], str(row["requests"]), *(f"{row[k]:.3f}" if k in row else "-" for k in kinds)]
        for row in rows
    ]
    headers = ["tree", "requests", "first plan", "a step's plan", "leaves grew"]
    return "## Planning on the host, ms\n\n" + markdown(headers, lines)


def _dram(rows: list[Row], why: str | None) -> str:
    if not rows:
        return f"## DRAM bytes\n\nNot counted: {why}" if why else ""
    lines = [
        [
            row["tree"],
            row["engine"],
            f"{row['kv_bytes'] / 1e6:.1f}",
            f"{row['read_bytes'] / 1e6:.1f}",
            f"{row['read_over_unique_kv']:.3f}",
            f"{row['written_bytes'] / 1e6:.1f}",
            f"{row['l2_read_bytes'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    headers = ["tree", "engine", "unique KV MB", "DRAM read MB", "read / unique KV", "written MB"]
    saved = [
        f"Paged decode reads, of what tree decode reads, from {where}: "
        + ", ".join(f"{tree}: {ratio:.2f}x" for tree, ratio in savings(rows, kind).items())
        for where, kind in (("DRAM", "read_bytes"), ("the L2 cache", "l2_read_bytes"))
    ]
    return "\n\n".join(["## DRAM bytes", markdown([*headers, "L2 read MB"], lines), *saved])
