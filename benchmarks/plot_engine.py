"""Draw a run of bench_engine.py: `python benchmarks/plot_engine.py results/h200/engine.json`.

Needs matplotlib, which the project does not.
"""

import json
import sys
from pathlib import Path
from typing import Any

OURS, PEER, LINE = "#33658a", "#d1495b", "#8d99ae"
ROWS, LOOP = "engine_rows.png", "engine_open_loop.png"


def draw(file: Path) -> list[str]:
    """Both pictures, beside the file; what to say about them."""
    try:
        import matplotlib
    except ImportError:
        return ["no plots: matplotlib is not installed; plot_engine.py draws them from the file"]
    matplotlib.use("agg")
    result: dict[str, Any] = json.loads(file.read_text("utf-8"))
    drawn: list[str] = []
    if rows := [row for row in result["rows"] if row["ours_ms"]]:
        _rows(result, rows, file.with_name(ROWS))
        drawn.append(f"drew {file.with_name(ROWS)}")
    if result["open_loop"]:
        _open_loop(result, file.with_name(LOOP))
        drawn.append(f"drew {file.with_name(LOOP)}")
    return drawn


def _axes(title: str, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    return figure, axes


def _rows(result: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Ours, the peer's, floor and goal of each row, over time."""
    figure, axes = _axes(f"Milliseconds through gRPC on {result['gpu'] or 'a CPU'}", 5.5)
    places = range(len(rows))
    for label, key, marker, colour in (
        ("ours", "ours_ms", "o", OURS),
        ("peer", "peer_ms", "x", PEER),
        ("goal", "goal_ms", "|", "black"),
        ("floor", "floor_ms", "|", LINE),
    ):
        points = [(row[key], place) for row, place in zip(rows, places, strict=True) if row[key]]
        if points:
            axes.scatter(*zip(*points, strict=True), s=45, marker=marker, color=colour, label=label)
    axes.set_yticks(list(places), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ms: a call of a Score row (all calls at once), a token of a Generate row")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _open_loop(result: dict[str, Any], path: Path) -> None:
    from matplotlib import ticker

    figure, axes = _axes(f"Open loop on {result['gpu'] or 'a CPU'}", 4.0)
    levels = [level for level in result["open_loop"]["levels"] if level["latency"]]
    rates = [level["items_per_s"] for level in levels]
    for key, colour in (("p99", OURS), ("p50", LINE)):
        axes.plot(rates, [level["latency"][key] for level in levels], "o-", color=colour, label=key)
    axes.axhline(500, color=PEER, linewidth=1, linestyle="--", label="500 ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("items scored a second")
    axes.set_ylabel("ms from the moment that a call was due")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1])), sep="\n")
