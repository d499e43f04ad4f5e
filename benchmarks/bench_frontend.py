"""What the service adds to the model's time: by stage, a call, a round of calls, a stream.

Run it with `make bench-frontend`; ARGS=--quick takes half a minute.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report
from frontend_rounds import Rounds, Streams
from frontend_stages import Shape, Stages
from rich.console import Console
from rich.progress import track
from rich.table import Table

OUTPUT = Path(__file__).with_name("results") / "cpu" / "frontend.json"
MAX_STEP_TOKENS = 32_768
SHAPES = (
    Shape(prefix_tokens=300, items=10, item_tokens=30),
    Shape(prefix_tokens=2048, items=100, item_tokens=64),
    Shape(prefix_tokens=8192, items=500, item_tokens=32),
    Shape(prefix_tokens=8192, items=32, item_tokens=256),
    Shape(prefix_tokens=512, items=2000, item_tokens=20),
)
CASES = (  # shape, what its items are sent as, calls at once
    *((shape, "ids", 1) for shape in SHAPES),
    (SHAPES[0], "ids", 16),
    (SHAPES[1], "texts", 1),
    (Shape(prefix_tokens=16, items=100, item_tokens=64), "one text, a context each", 1),
)
# As an H200 takes them with Qwen3-0.6B, by its steps of 600 to 8,448 rows.
GPU_STEPS = ("--step-seconds", "0.002", "--row-seconds", "1.15e-6")
STREAMS = (
    Streams(count=64, tokens=64, burst=1),
    Streams(count=64, tokens=64, burst=8),
    Streams(count=1, tokens=64, burst=1),
    Streams(count=64, tokens=512, burst=1, step_ms=2),
    Streams(count=1, tokens=512, burst=1, step_ms=2),
    Streams(count=64, tokens=512, burst=8, step_ms=1.3),
    Streams(count=128, tokens=512, burst=8, step_ms=4),
)

Rows = Mapping[str, Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="its tokenizer is loaded")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    console = Console()
    calls, rounds = (20, 20) if options.quick else (100, 100)
    stages = Stages(max_step_tokens=MAX_STEP_TOKENS)
    by_stage = {
        shape.name: stages.measure(shape, calls=calls)
        for shape in track(SHAPES, "stages", console=console)
    }
    _show(console, "CPU milliseconds of a call by stage, warm caches", _turned(by_stage))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = Rounds(options.model, log, max_step_tokens=MAX_STEP_TOKENS)
        scores = {
            f"{shape.name}, {kind}, {count} at once": server.score(
                shape, kind=kind, at_once=count, rounds=rounds
            )
            for shape, kind, count in track(CASES, "calls", console=console)
        }
        scores[f"{SHAPES[0].name}, ids, 16 at once, steps as a GPU's"] = server.score(
            SHAPES[0], kind="ids", at_once=16, rounds=rounds, worker=GPU_STEPS
        )
        _show(console, "Score calls of a server whose worker computes nothing", scores)
        streams = {
            case.name: server.generate(case, rounds=2 if options.quick else 8)
            for case in track(STREAMS, "streams", console=console)
        }
        _show(console, "Generate streams of such a server", streams)
    results = {
        "max_step_tokens": MAX_STEP_TOKENS,
        "stages_cpu_ms": by_stage,
        "score_calls": scores,
        "generate_streams": streams,
    }
    report.write(options.output, command="make bench-frontend", threads=1, results=results)
    console.print(f"wrote {options.output}")


def _turned(rows: Rows) -> dict[str, dict[str, Any]]:
    """Columns as rows, with a sum."""
    stages = next(iter(rows.values()))
    turned = {stage: {name: row[stage] for name, row in rows.items()} for stage in stages}
    turned["sum"] = {name: round(sum(row.values()), 3) for name, row in rows.items()}
    return turned


def _show(console: Console, title: str, rows: Rows) -> None:
    table = Table(title=title)
    table.add_column("")
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:g}" for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
