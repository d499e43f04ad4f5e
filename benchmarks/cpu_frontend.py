"""Calls a second that one front end answers, with a worker that computes nothing."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress
from served import Served
from workloads import random_tokens

from stemserve.service.bench.server_process import environment, serving, stop

FAKE_WORKER = Path(__file__).parent.parent / "tests" / "fake_worker.py"
LOAD = Path(__file__).with_name("frontend_load.py")
PREFIX_TOKENS = 512
IN_FLIGHT = 32
# A call is about 1,400 tokens. The default of 2,048 would leave steps of one call each.
MAX_STEP_TOKENS = 32_768
SIDES: Mapping[str, tuple[str, ...]] = {"unary": (), "stream": ("--stream",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndLoad:
    model: Path  # its tokenizer is loaded; its weights are not
    calls: int  # a round
    repeats: int

    def measure(self, *, log: Path, progress: Progress) -> dict[str, Any]:
        """Unary calls and one ScoreStream in turn; a first round warms up."""
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        task = progress.add_task("front end", total=(self.repeats + 1) * len(SIDES))
        measured: dict[str, Any] = {}
        with _front_end(self.model, log) as address, Served(address) as served:
            prefix = random_tokens(np.random.default_rng(0), PREFIX_TOKENS)
            prefix_id = served.register(prefix).prefix_id
            for repeat in range(self.repeats + 1):
                for side, options in SIDES.items():
                    progress.update(task, description=f"front end: {side}")
                    load = ["--server", address, "--prefix-id", prefix_id, *options]
                    load += ["--calls", str(self.calls), "--in-flight", str(IN_FLIGHT)]
                    measured = _run_load([*load, "--seed", str(repeat)])
                    if repeat:
                        rates[side].append(round(measured["calls"] / measured["seconds"], 1))
                    progress.advance(task)
        return {
            "in_flight": IN_FLIGHT,
            "calls_a_round": self.calls,
            "request_bytes": measured["request_bytes"],
            "max_step_tokens": MAX_STEP_TOKENS,
            **{
                f"{side}_calls_per_s": {"median": median(values), "repeats": values}
                for side, values in rates.items()
            },
        }


def _run_load(options: list[str]) -> dict[str, Any]:
    # It imports our modules, so it keeps our import path.
    done = subprocess.run(
        [sys.executable, str(LOAD), *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the load client failed: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


@contextmanager
def _front_end(model: Path, log: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        socket = f"unix:{Path(folder) / 'worker.sock'}"
        worker = subprocess.Popen(
            [sys.executable, str(FAKE_WORKER), "--listen", socket], env=environment(), text=True
        )
        try:
            options = ["--model", str(model), "--worker", socket]
            options += ["--max-step-tokens", str(MAX_STEP_TOKENS)]
            with serving(options, log=log) as address:
                yield address
        finally:
            stop(worker)
