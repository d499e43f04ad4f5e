"""Predictions of `stemserve capacity` beside what was measured: the table of docs/capacity.md.

python benchmarks/check_capacity.py --write     # after a new run of bench_engine.py
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stemserve.kernels.pricing.cost_table_file import of_dtype, shipped_cost_tables, table_for_heads
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.rows import BASELINES, DecodeRow, Row, ScoreRow
from stemserve.worker.capacity.device_rates import RATES
from stemserve.worker.capacity.forward_seconds import ForwardSeconds
from stemserve.worker.capacity.prediction import Prediction
from stemserve.worker.capacity.workload import Workload
from stemserve.worker.config import GPU_STEP_TOKENS
from stemserve.worker.models.loader import read_model_config

DEVICE = "nvidia-h200"
RESULTS = Path(__file__).parent / "results/h200/engine.json"
PAGE = Path(__file__).parents[1] / "docs/capacity.md"
# Microseconds of a decode step as one graph, with the library's products: docs/log.md.
GRAPHS: Mapping[str, float] = {
    "decode 0.6B 1024/64": 1344,
    "decode 0.6B 8192/32": 1491,
    "decode 4B 1024/64": 3566,
    "decode 4B 8192/32": 3804,
    "decode 4B 8192/128": 5371,
    "decode 4B 50000/16": 5034,
}
TABLE = re.compile(r"^Run of .*\n\n(?:\|.*\n)+(?:\nDecode steps as .*\n)?", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Milliseconds: of a row's calls, or of a token."""

    row: str
    gpu: float
    measured_gpu: float | None  # None: the row's numbers are of more calls than one round
    whole: float | None  # None: a Generate row's time holds the others' prompts
    measured_whole: float
    cached: float | None = None  # the same calls again, their prefixes cached
    measured_cached: float | None = None

    @property
    def gpu_error(self) -> float | None:
        return _error(self.gpu, self.measured_gpu)

    @property
    def whole_error(self) -> float | None:
        return _error(self.whole, self.measured_whole)

    @property
    def cached_error(self) -> float | None:
        return _error(self.cached, self.measured_cached)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def forward_of(model: str) -> ForwardSeconds:
    """Of a model of the baselines, in bfloat16 on an H200."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_model_config(SHAPES[model].write(Path(folder)))
    tables = of_dtype(shipped_cost_tables(DEVICE), "bfloat16")
    return ForwardSeconds(
        model=config,
        dtype=torch.bfloat16,
        rates=RATES[DEVICE],
        costs=table_for_heads(tables, config.heads),
    )


def prediction_of(row: Row, forward: ForwardSeconds, *, hit_rate: float = 0.0) -> Prediction:
    match row:
        case ScoreRow():
            workload = Workload(
                prefix_tokens=row.prefix_tokens,
                items=row.items,
                item_tokens=row.item_tokens,
                hit_rate=hit_rate,
            )
            together = 1
        case DecodeRow():
            together = row.requests
            workload = Workload(
                prefix_tokens=row.prefix_tokens,
                samples=row.requests,
                new_tokens=row.new_tokens + 2 * row.own_tokens,  # half of which decode sees
            )
    return Prediction(
        forward=forward, workload=workload, step_rows=GPU_STEP_TOKENS, decode_rows=together
    )


def compared(measured: Mapping[str, Any]) -> Iterator[Compared]:
    """Of every row that both know."""
    rows = {row.name: row for row in BASELINES}
    forwards = {model: forward_of(model) for model in SHAPES}
    for found in measured["rows"]:
        row = rows[found["name"]]
        prediction = prediction_of(row, forwards[row.model])
        match row:
            case ScoreRow():
                cached = prediction_of(row, forwards[row.model], hit_rate=1.0)
                of_more = found["device_ms"] > found["ours_ms"]
                yield Compared(
                    row=row.name,
                    gpu=prediction.prefill(row.calls).total * 1e3,
                    measured_gpu=None if of_more else found["device_ms"],
                    whole=prediction.at_once(row.calls) * 1e3,
                    measured_whole=found["ours_ms"],
                    cached=cached.at_once(row.calls) * 1e3,
                    measured_cached=found["warm_ms"],
                )
            case DecodeRow():
                yield Compared(
                    row=row.name,
                    gpu=prediction.token.total * 1e3,
                    measured_gpu=found["device_ms_a_token"],
                    whole=None,
                    measured_whole=found["ours_ms"],
                )


def table(rows: list[Compared]) -> str:
    lines = ["| row | GPU | whole | whole, prefix cached |", "|---|---|---|---|"]
    for row in rows:
        cells = (
            _cell(row.gpu, row.measured_gpu),
            _cell(row.whole, row.measured_whole),
            _cell(row.cached, row.measured_cached),
        )
        lines.append(f"| {row.row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(predicted: float | None, measured: float | None) -> str:
    error = _error(predicted, measured)
    return "" if error is None else f"{predicted:.3g} / {measured:.3g} ({error:+.0%})"


def graphs() -> str:
    """A line of decode steps by themselves, larger models included."""
    rows = {row.name: row for row in BASELINES}
    forwards = {model: forward_of(model) for model in SHAPES}
    cells: list[str] = []
    for name, measured in GRAPHS.items():
        row = rows[name]
        token = prediction_of(row, forwards[row.model]).token
        predicted = (token.total - token.waiting) * 1e6
        error = f"{predicted / measured - 1:+.0%}"
        cells.append(f"{row.name} {predicted:,.0f} / {measured:,.0f} ({error})")
    return "Decode steps as graphs, us: " + "; ".join(cells) + "."


def section(measured: Mapping[str, Any]) -> str:
    """Of the page: which run, and the table."""
    rows = table(list(compared(measured)))
    return f"Run of {measured['date']}:\n\n{rows}\n\n{graphs()}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="engine.json")
    parser.add_argument("--write", action="store_true", help="into docs/capacity.md")
    options = parser.parse_args()
    text = section(json.loads(options.results.read_text()))
    print(text, end="")
    if options.write:
        PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(), count=1))


if __name__ == "__main__":
    main()
