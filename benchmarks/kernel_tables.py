"""Results of a run as text: tables in markdown, and a progress bar."""

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from kernel_summary import best_peer, engine_us

Row = dict[str, Any]

BAR = 24


class Progress:
    """One line on a terminal, rewritten; elsewhere a line every few seconds."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total = max(1, total)
        self._done = 0
        self._stream = stream
        self._started = time.perf_counter()
        self._shown = -10.0

    def step(self, what: str) -> None:
        """Called before a part starts."""
        spent = time.perf_counter() - self._started
        live = self._stream.isatty()
        if live or spent - self._shown >= 5:
            filled = BAR * self._done // self._total
            bar = "#" * filled + "." * (BAR - filled)
            line = f"[{bar}] {self._done}/{self._total} {spent:4.0f} s  {what[:50]:50s}"
            self._stream.write(f"\r{line}" if live else f"{line.rstrip()}\n")
            self._stream.flush()
            self._shown = spent
        self._done += 1

    def close(self) -> None:
        if self._stream.isatty():
            self._stream.write("\r" + " " * (BAR + 75) + "\r")


def markdown(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(headers, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(headers), rule, *(line(cells) for cells in lines)])


def milliseconds(us: float | None, digits: int = 3) -> str:
    return "-" if us is None else f"{us / 1e3:.{digits}f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def engine_cell(row: Row, engine: str) -> str:
    """A time in ms, or the word for why there is none."""
    found: Row = row["engines"].get(engine, {})
    for word in ("wrong", "failed", "cannot"):
        if word in found:
            return word
    return milliseconds(engine_us(row, engine))


def decode_table(rows: Sequence[Row], own: Sequence[str], peers: Sequence[str]) -> str:
    """Warm-L2 graph replays; codec also with a cold L2, and against floor and best peer."""
    headers = [
        "tree", "requests", "share x", "floor", *peers, "best peer / floor", *own, "codec cold",
        "codec / floor", "best peer / codec",
    ]  # fmt: skip
    return markdown(headers, [_decode_line(row, own, peers) for row in rows])


def _decode_line(row: Row, own: Sequence[str], peers: Sequence[str]) -> list[str]:
    best, ours = best_peer(row, peers), engine_us(row, "codec")
    floor = float(row["floor_us"])
    cells = {name: engine_cell(row, name) for name in (*peers, *own)}
    if best is not None:
        cells[best[0]] = f"**{cells[best[0]]}**"
    return [
        row["tree"][:44],
        str(row["requests"]),
        f"{row['share']:.1f}",
        milliseconds(floor),
        *(cells[name] for name in peers),
        ratio(best[1] / floor if best else None),
        *(cells[name] for name in own),
        milliseconds(engine_us(row, "codec", "cold_us")),
        ratio(ours / floor if ours else None),
        ratio(best[1] / ours if best and ours else None),
    ]


def choice_table(rows: Sequence[Row], own: Sequence[str]) -> str:
    lines: list[list[str]] = []
    for row in rows:
        times = [engine_cell(row, name) for name in own]
        lines.append([row["tree"][:44], *times, row["chosen"], percent(row["regret"])])
    return markdown(["tree", *own, "chosen", "regret"], lines)


def prefill_table(rows: Sequence[Row], strategies: Sequence[str]) -> str:
    """Eager means in ms; dispatch's choice, also as a graph's replay; the best of a row is bold."""
    headers = ["P / S / M", "heads", "cached", "full prompts", *strategies, "floor", "chosen"]
    return markdown(
        [*headers, "its graph", "regret"], [_prefill_line(row, strategies) for row in rows]
    )


def _prefill_line(row: Row, strategies: Sequence[str]) -> list[str]:
    found: dict[str, Row] = row["strategies"]
    cells = {name: _strategy_cell(found.get(name, {})) for name in strategies}
    timed = {name: entry["us"] for name, entry in found.items() if "us" in entry}
    if timed:
        best = min(timed, key=lambda name: float(timed[name]))
        cells[best] = f"**{cells[best]}**"
    return [
        f"{row['prefix']} / {row['item']} / {row['items']}",
        "/".join(str(heads) for heads in row["heads"][:2]),
        "yes" if row["cached"] else "no",
        milliseconds(row.get("full_prompts_us")),
        *(cells[name] for name in strategies),
        milliseconds(row["floor_us"], 4),
        row["chosen"],
        milliseconds(found[row["chosen"]].get("graph_us")),
        percent(row["regret"]),
    ]


def _strategy_cell(entry: Row) -> str:
    if "far_us" in entry:
        return f"({milliseconds(entry['far_us'])})"
    for word in ("wrong", "failed", "refused"):
        if word in entry:
            return word
    return milliseconds(entry.get("us"))


def facts_table(figures: Row) -> str:
    """Names and values, as a summary is printed."""
    lines = [[name, "-" if value is None else f"{value:.4g}"] for name, value in figures.items()]
    return markdown(["figure", "value"], lines)
