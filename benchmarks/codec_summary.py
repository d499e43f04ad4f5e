"""Ratios of tree decode to its floor and to its peers, from the rows of a run."""

import math
from typing import Any


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(rows: list[dict[str, Any]], peers: list[str], least_us: float) -> dict[str, float]:
    result: dict[str, float] = {}
    for kind in ("replay_us", "cold_us"):
        long = [row for row in rows if row["floor_us"] >= least_us]
        result[f"vs_floor_{kind}"] = geometric([r["codec"][kind] / r["floor_us"] for r in long])
        result[f"vs_floor_all_{kind}"] = geometric([r["codec"][kind] / r["floor_us"] for r in rows])
        known = [
            (min(r[p][kind] for p in peers if kind in r.get(p, {})), r)
            for r in rows
            if any(kind in r.get(p, {}) for p in peers)
        ]
        if known:
            ratios = [best / r["codec"][kind] for best, r in known]
            result[f"vs_best_peer_{kind}"] = geometric(ratios)
            result[f"worst_vs_best_peer_{kind}"] = min(ratios)
        fa3 = [r["fa3"][kind] / r["codec"][kind] for r in rows if kind in r.get("fa3", {})]
        result[f"vs_fa3_{kind}"] = geometric(fa3)
    return result
