"""Draw a run of bench_kernels.py: `python benchmarks/plot_kernels.py results/h200/kernels.json`.

Needs matplotlib, which the project does not.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kernel_summary import LEAST_FLOOR_US, best_peer, engine_us

Row = dict[str, Any]

SPEEDUP, FLOOR = "speedup_against_sharing.png", "time_against_floor.png"
OURS, PEER, LINE = "#33658a", "#d1495b", "#8d99ae"


def draw(result: dict[str, Any], folder: Path) -> list[str]:
    """Both pictures; what to say about them."""
    rows: list[Row] = [*result["table"], *result["trees"]]
    if not rows:
        return []
    try:
        import matplotlib
    except ImportError:
        return ["no plots: matplotlib is not installed; plot_kernels.py draws them from the file"]
    matplotlib.use("agg")
    _speedup(result, rows, folder / SPEEDUP)
    _against_floor(result, rows, folder / FLOOR)
    return [f"drew {folder / SPEEDUP} and {folder / FLOOR}"]


def _axes(title: str) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    return figure, axes


def _plain(axis: Any, values: list[float]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_formatter(NullFormatter())


def _speedup(result: dict[str, Any], rows: list[Row], path: Path) -> None:
    """Best peer and FlashAttention 3 over ours, by how often a token is shared."""
    figure, axes = _axes(f"Tree decode on an {result['gpu']}, fp16, warm L2, graph replay")
    for label, colour, peers in (
        ("best peer of each tree / codec", OURS, result["peers"]),
        ("FlashAttention 3 / codec", PEER, ["fa3"]),
    ):
        points = [
            (row["share"], best[1] / ours)
            for row in rows
            if row["floor_us"] >= LEAST_FLOOR_US
            and (best := best_peer(row, peers)) is not None
            and (ours := engine_us(row, "codec")) is not None
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=22, color=colour, label=label, alpha=0.8)
    axes.axhline(1, color=LINE, linewidth=1)
    _plain(axes.xaxis, [1, 2, 5, 10, 20, 50, 100, 1000])
    _plain(axes.yaxis, [0.5, 1, 2, 5, 10, 20])
    axes.set_xlabel("sharing: tokens that the requests see / tokens stored")
    axes.set_ylabel("times as fast")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _against_floor(result: dict[str, Any], rows: list[Row], path: Path) -> None:
    figure, axes = _axes(f"Time against the floor, {result['gpu']}, one layer, fp16")
    peers = result["peers"]
    best = [(row["floor_us"], found[1]) for row in rows if (found := best_peer(row, peers))]
    ours = [(row["floor_us"], us) for row in rows if (us := engine_us(row, "codec")) is not None]
    for label, colour, marker, points in (
        ("best peer of each tree", PEER, "x", best),
        ("codec", OURS, "o", ours),
    ):
        if points:
            axes.scatter(*zip(*points, strict=True), s=22, color=colour, marker=marker, label=label)
    ends = [min(row["floor_us"] for row in rows), max(row["floor_us"] for row in rows)]
    axes.plot(ends, ends, color=LINE, linewidth=1, label="floor")
    axes.plot(
        ends, [1.1 * end for end in ends], color=LINE, linewidth=1, linestyle="--", label="1.1x"
    )
    _plain(axes.xaxis, [0.1, 1, 10, 100, 1000])
    _plain(axes.yaxis, [1, 10, 100, 1000, 10000])
    axes.set_xlabel("floor, us: unique K/V, q and result at 4.3 TB/s, or arithmetic at 790 TFLOP/s")
    axes.set_ylabel("us")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(*draw(json.loads(source.read_text()), source.parent), sep="\n")
