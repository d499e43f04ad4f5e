"""Draw the Grafana dashboards from a Prometheus, panel by panel, as pictures.

python benchmarks/draw_dashboards.py http://127.0.0.1:9090 --minutes 5 --output docs/images

What is drawn are the dashboards' own expressions, legends and units; how it looks is not Grafana's.
Needs matplotlib, which the project does not.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

DASHBOARDS = Path(__file__).parents[1] / "deploy/grafana"
COLUMNS = 24
COLUMN_IN, ROW_IN = 0.72, 0.34  # inches of a cell of the dashboards' grid
POINTS = 240
MOST_SERIES = 12  # in a legend
EVERY = ".+"  # of a variable that may be anything
COLOURS = ("#3274d9", "#56a64b", "#e0752d", "#e02f44", "#8f3bb8", "#f2cc0c", "#37872d", "#0a9396")
INK, FAINT = "#24292e", "#8a8f98"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    times: list[float]  # minutes before the end
    values: list[float]


@dataclass(kw_only=True)
class Source:
    """A span of time of one Prometheus."""

    address: str
    end: float
    seconds: float
    scrape_s: float
    texts: dict[str, str] = field(default_factory=dict[str, str])  # of text-box variables

    def series(self, target: Mapping[str, Any]) -> Iterator[Series]:
        step = max(self.scrape_s, self.seconds / POINTS)
        answer = self._get(
            query=self._filled(target["expr"], step),
            start=self.end - self.seconds,
            end=self.end,
            step=step,
        )
        for found in answer["result"]:
            points = {float(t): float(v) for t, v in found["values"]}
            if not any(map(math.isfinite, points.values())):
                continue
            start = self.end - self.seconds
            steps = [start + step * number for number in range(round(self.seconds / step) + 1)]
            yield Series(
                name=legend(target["legendFormat"], found["metric"]),
                times=[(t - self.end) / 60 for t in steps],
                values=[_at(points, t, step) for t in steps],
            )

    def _filled(self, expression: str, step: float) -> str:
        """As Grafana does it, with every choice of a variable."""
        rate_s = max(step + self.scrape_s, 4 * self.scrape_s)
        values = {
            "__rate_interval": f"{math.ceil(rate_s)}s",
            "__range": f"{math.ceil(self.seconds)}s",
        } | self.texts
        return re.sub(r"\$(\w+)", lambda found: values.get(found[1], EVERY), expression)

    def _get(self, **parameters: object) -> Any:
        url = f"{self.address}/api/v1/query_range?{urlencode(parameters)}"
        with urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]


def _at(points: Mapping[float, float], time_s: float, step: float) -> float:
    """NaN where Prometheus has nothing: a line has a gap there."""
    nearest = min(points, key=lambda known: abs(known - time_s))
    return points[nearest] if abs(nearest - time_s) < step / 2 else math.nan


def legend(pattern: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    suffix: str
    scale: float = 1.0
    thousands: str = ""  # prefixes of powers of 1,000, or empty for none


UNITS: Mapping[str, Unit] = {
    "none": Unit(suffix="", thousands=" K M G T"),
    "reqps": Unit(suffix=" calls/s", thousands=" K M"),
    "ops": Unit(suffix="/s", thousands=" K M G"),
    "percentunit": Unit(suffix=" %", scale=100),
    "s": Unit(suffix="s", thousands=" "),
    "bytes": Unit(suffix="B", thousands=" K M G T"),
    "Bps": Unit(suffix="B/s", thousands=" K M G T"),
    "currencyUSD": Unit(suffix=" $"),
}


def in_unit(value: float, name: str) -> str:
    unit = UNITS[name]
    value *= unit.scale
    if name == "s" and value and abs(value) < 1:
        value, prefix = (value * 1e3, "m") if abs(value) >= 1e-3 else (value * 1e6, "u")
        return f"{value:.3g} {prefix}s"
    prefixes = unit.thousands.split(" ") or [""]
    power = 0
    while abs(value) >= 1000 and power + 1 < len(prefixes):
        value, power = value / 1000, power + 1
    prefix = prefixes[power]
    space = " " if prefix or unit.suffix in ("B", "B/s", "s") else ""
    return f"{value:.3g}{space}{prefix}{unit.suffix}"


def draw(dashboard: Path, source: Source, output: Path) -> list[str]:
    """Writes a picture; returns the titles of panels without data."""
    from matplotlib import pyplot

    described = json.loads(dashboard.read_text())
    source.texts = {
        variable["name"]: variable["query"]
        for variable in described["templating"]["list"]
        if variable["type"] == "textbox"
    }
    panels: list[dict[str, Any]] = described["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    size = (COLUMNS * COLUMN_IN, (rows + 1.5) * ROW_IN)
    figure = pyplot.figure(figsize=size, facecolor="white", dpi=80)
    page = Page(figure=figure, rows=rows + 1.5)
    page.title(described["title"], at=0.75)
    empty: list[str] = []
    for panel in panels:
        if panel["type"] == "row":
            page.title(panel["title"], at=panel["gridPos"]["y"] + 2.1, size=10)
            continue
        found = [s for target in panel["targets"] for s in source.series(target)]
        page.panel(panel, found)
        if not found:
            empty.append(panel["title"])
    figure.savefig(output, pil_kwargs={"optimize": True})
    pyplot.close(figure)
    return empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    figure: Any
    rows: float  # of the grid, the title included

    def title(self, text: str, *, at: float, size: int = 14) -> None:
        where = 1 - at / self.rows
        self.figure.text(0.012, where, text, fontsize=size, weight="bold", color=INK, va="center")

    def panel(self, panel: Mapping[str, Any], found: list[Series]) -> None:
        place = panel["gridPos"]
        small = place["h"] <= 4
        left, right = (0.2, 0.2) if panel["type"] == "stat" else (1.35, 0.35)
        above, below = (1.1, 0.2) if small or panel["type"] == "stat" else (1.15, 2.6)
        box = (
            (place["x"] + left) / COLUMNS,
            1 - (place["y"] + 1.5 + place["h"] - below) / self.rows,
            (place["w"] - left - right) / COLUMNS,
            (place["h"] - above - below) / self.rows,
        )
        axes = self.figure.add_axes(box)
        self.figure.text(
            (place["x"] + 0.2) / COLUMNS,
            1 - (place["y"] + 1.5 + 0.55) / self.rows,
            panel["title"],
            fontsize=9,
            weight="bold",
            color=INK,
            va="center",
        )
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if not found:
            _note(axes, "no data")
        elif panel["type"] == "stat":
            _stat(axes, panel, found, unit)
        else:
            _lines(axes, found, unit)


def _note(axes: Any, text: str, size: int = 9, colour: str = FAINT) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#e6e8eb")
    axes.text(0.5, 0.5, text, fontsize=size, color=colour, ha="center", va="center")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _stat(axes: Any, panel: Mapping[str, Any], found: list[Series], unit: str) -> None:
    if panel["options"]["textMode"] == "name":
        _note(axes, "\n".join(series.name for series in found), size=10, colour=INK)
    else:
        last = "  ".join(in_unit(_last(series), unit) for series in found)
        _note(axes, last, size=17, colour=COLOURS[1])


def _last(series: Series) -> float:
    return next(value for value in reversed(series.values) if math.isfinite(value))


def _lines(axes: Any, found: list[Series], unit: str) -> None:
    for number, series in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        label = series.name if number < MOST_SERIES else None
        style = "-" if number < len(COLOURS) else "--"
        marker = "." if len(series.values) == 1 else ""
        axes.plot(
            series.times, series.values, style, marker=marker, color=colour, lw=1.1, label=label
        )
    axes.set_xlim(min(s.times[0] for s in found), 0)
    finite = [value for s in found for value in s.values if math.isfinite(value)]
    low, high = min(0.0, *finite), max(finite)
    axes.set_ylim(low * 1.05, high * 1.08 if high > 0 else 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: in_unit(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g} min" if value else "now")
    axes.locator_params(axis="both", nbins=4)
    axes.tick_params(labelsize=7, colors=FAINT, length=2)
    axes.grid(visible=True, color="#eceef0", lw=0.6)
    axes.spines[:].set_color("#e6e8eb")
    columns = 1 + (len(found) > 3) + (len(found) > 6)
    if len(found) > MOST_SERIES:
        axes.plot([], [], " ", label=f"and {len(found) - MOST_SERIES} more")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.12, -0.13),
        fontsize=6.5,
        ncols=columns,
        frameon=False,
        labelcolor=INK,
        handlelength=1.2,
        borderaxespad=0,
        labelspacing=0.25,
    )


def draw_all(source: Source, output: Path) -> dict[str, list[str]]:
    """Panels without data, by picture."""
    import matplotlib

    matplotlib.use("agg")
    output.mkdir(parents=True, exist_ok=True)
    empty: dict[str, list[str]] = {}
    for dashboard in sorted(DASHBOARDS.glob("*.json")):
        picture = output / f"{dashboard.stem}.png"
        empty[str(picture)] = draw(dashboard, source, picture)
    return empty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="its address, such as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=180.0, help="before now")
    parser.add_argument("--scrape-seconds", type=float, default=15.0, help="of Prometheus")
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the pictures")
    options = parser.parse_args()
    source = Source(
        address=options.prometheus,
        end=time.time(),
        seconds=options.minutes * 60,
        scrape_s=options.scrape_seconds,
    )
    for picture, titles in draw_all(source, options.output).items():
        print(f"drew {picture}" + (f"; no data: {', '.join(titles)}" if titles else ""))


if __name__ == "__main__":
    main()
