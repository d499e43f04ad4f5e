"""A search's step beside a token of samples: on a server, and what comes of the times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_beam_steps import BEAMS, SAMPLES, Step, summary

from stemserve.service.bench.models import ModelShape

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_beam_steps.py"
TINY = ModelShape(
    name="Tiny", layers=1, hidden=32, query_heads=2, kv_heads=1, intermediate=32, head_dim=16,
    vocab=1000, context_tokens=512,
)  # fmt: skip


def steps(*wall: float) -> list[Step]:
    return [Step(wall=each, device=each / 2, idle=0.0) for each in wall]


def test_the_ratio_is_of_medians() -> None:
    found = summary({SAMPLES: steps(4.0, 9.0, 3.0), BEAMS: steps(5.0, 1.0, 7.0)})
    assert (found["samples_wall_ms"], found["beams_wall_ms"]) == (4.0, 5.0)
    assert found["beams_device_ms"] == 2.5
    assert found["ratio"] == pytest.approx(1.25)


def test_both_are_measured_on_one_server_in_turns(tmp_path: Path) -> None:
    model, output = TINY.write(tmp_path), tmp_path / "steps.json"
    words = [sys.executable, str(SCRIPT), "--model", str(model), "--widths", "2", "3"]
    words += ["--prompt-tokens", "40", "--new-tokens", "5", "--rounds", "1"]
    words += ["--output", str(output)]
    words += ["--serve-options", "--load-format", "dummy", "--threads", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())["results"]
    assert results.keys() == {"2", "3"}
    told = [line.split(" Step")[0] for line in done.stderr.splitlines() if "Step(" in line]
    assert told == [
        f"round {number}: {width} {kind}"
        for number in (0, 1)
        for width in (2, 3)
        for kind in (SAMPLES, BEAMS)
    ]
