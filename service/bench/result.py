"""The result file: an entry a row of the tables, rows without sharing, the open loop, a summary."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stemserve.service.bench.agreement import compare
from stemserve.service.bench.measured import MeasuredRow, rounded
from stemserve.service.bench.open_loop import Level, OpenLoop, best
from stemserve.service.bench.peer import PeerRow
from stemserve.service.bench.rows import LEAST_THROUGHPUT, DecodeRow, ScoreRow, UnsharedRow

Entry = dict[str, Any]

COLUMNS = (
    "name",
    "ours_ms",
    "peer",
    "peer_ms",
    "floor_ms",
    "goal_ms",
    "at_goal",
    "speedup",
    "failures",
    "p50_ms",
    "p90_ms",
    "p99_ms",
)


@dataclass(slots=True, kw_only=True)
class Result:
    facts: Mapping[str, Any]
    rows: list[Entry] = field(default_factory=list[Entry])
    unshared: list[Entry] = field(default_factory=list[Entry])
    open_loop: Entry | None = None
    notes: list[str] = field(default_factory=list[str])  # of servers that did not start
    left_out: list[str] = field(default_factory=list[str])  # rows for which there was no time

    def add_row(self, ours: MeasuredRow, peer: PeerRow) -> Entry:
        if isinstance(ours.row, UnsharedRow):
            self.unshared.append(unshared_entry(ours, ours.row, peer))
            return self.unshared[-1]
        self.rows.append(table_entry(ours, ours.row, peer))
        return self.rows[-1]

    def add_open_loop(self, loop: OpenLoop, levels: Sequence[Level]) -> None:
        self.open_loop = {
            "name": loop.name,
            "items_per_s_at_p99_500ms": best(tuple(levels)),
            "goal_items_per_s": 2_000,
            "levels": [asdict(level) | {"kept": level.is_kept} for level in levels],
        }

    @property
    def summary(self) -> Entry:
        """Rows without a peer do not count, but for the two numbers that say measured."""
        counted = [row for row in self.rows if row["peer_ms"] is not None and row["ours_ms"]]
        ratios = [math.log(row["speedup"]) for row in counted]
        loop = self.open_loop
        return {
            "rows_at_goal": sum(bool(row["at_goal"]) for row in counted),
            "rows": len(counted),
            "speedup_geomean": rounded(math.exp(sum(ratios) / len(ratios))) if ratios else None,
            "gpu_idle_fraction": _idle(self.rows),
            "items_per_s_at_p99_500ms": loop["items_per_s_at_p99_500ms"] if loop else None,
            "rows_measured": sum(row["ours_ms"] is not None for row in self.rows),
            "rows_measured_at_goal": sum(bool(row["at_goal"]) for row in self.rows),
            "failures": sum(row["failures"] for row in (*self.rows, *self.unshared)),
        }

    def write(self, path: Path) -> None:
        """The JSON file, and a table of the rows beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            **self.facts,
            "summary": self.summary,
            "rows": self.rows,
            "unshared": self.unshared,
            "open_loop": self.open_loop,
            "left_out": self.left_out,
            "notes": self.notes,
        }
        half = path.with_name(path.name + ".part")
        half.write_text(json.dumps(content, indent=1) + "\n")
        half.replace(path)
        with path.with_suffix(".csv").open("w", newline="") as file:
            table: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            table.writeheader()
            table.writerows([*self.rows, *self.unshared])


def table_entry(ours: MeasuredRow, row: ScoreRow | DecodeRow, peer: PeerRow) -> Entry:
    at_goal = None
    if row.goal_ms is not None and ours.ours_ms is not None:
        at_goal = ours.ours_ms <= row.goal_ms and not ours.failures
    goal: Entry = {"floor_ms": row.floor_ms, "goal_ms": row.goal_ms, "at_goal": at_goal}
    unit = "ms a call" if isinstance(row, ScoreRow) else "ms a token"
    return _entry(ours, peer, unit, goal)


def unshared_entry(ours: MeasuredRow, row: UnsharedRow, peer: PeerRow) -> Entry:
    """The goal is a share of the peer's throughput."""
    found = _entry(ours, peer, "ms for all of it", {"goal_ms": None, "at_goal": None})
    tokens = row.all_new_tokens * 1e3
    for name in ("ours", "peer"):
        taken_ms = found[f"{name}_ms"]
        found[f"{name}_tokens_per_s"] = rounded(tokens / taken_ms) if taken_ms else None
    if found["peer_ms"]:
        found["goal_ms"] = rounded(found["peer_ms"] / LEAST_THROUGHPUT)
        at_goal = found["speedup"] is not None and found["speedup"] >= LEAST_THROUGHPUT
        found["at_goal"] = at_goal and not ours.failures
    return found


def _entry(ours: MeasuredRow, peer: PeerRow, unit: str, goal: Entry) -> Entry:
    times = ours.times
    peer_ms, why, agreement = _checked(ours, peer)
    return {
        "name": ours.row.name,
        "unit": unit,
        "ours_ms": ours.ours_ms,
        "peer": peer.peer,
        "peer_ms": peer_ms,
        "why_no_peer": why,
        **goal,
        "speedup": rounded(peer_ms / ours.ours_ms) if peer_ms and ours.ours_ms else None,
        "failures": ours.failures,
        "first_failure": ours.first_failure,
        "p50_ms": times.p50 if times else None,
        "p90_ms": times.p90 if times else None,
        "p99_ms": times.p99 if times else None,
        **ours.more,
        "rounds_ms": ours.rounds_ms,
        "peer_rounds_ms": peer.rounds_ms,
        "agreement": agreement,
    }


def _checked(ours: MeasuredRow, peer: PeerRow) -> tuple[float | None, str, Entry | None]:
    """The peer's time if it may count, why not, and how far the two agree."""
    if peer.peer_ms is None:
        return None, peer.why, None
    if not peer.compare:
        return peer.peer_ms, "", None
    try:
        agreement = compare(ours, peer)
    except ValueError as error:
        return None, f"not comparable: {error}", None
    kept = None if agreement.refusal else peer.peer_ms
    return kept, agreement.refusal, asdict(agreement)


def _idle(rows: Sequence[Entry]) -> float | None:
    """Share of the time between decode steps' starts and ends in which the device waited."""
    busy = sum(row.get("device_busy_s") or 0.0 for row in rows)
    idle = sum(row.get("device_idle_s") or 0.0 for row in rows)
    return rounded(idle / (busy + idle)) if busy else None
