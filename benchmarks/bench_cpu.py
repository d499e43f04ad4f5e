"""Compare stemserve with transformers on this CPU. The last line printed is one JSON object.

Each comparison looks at answers first: where ours and the peer's log-probabilities differ by more
than 1e-3, no speed is reported. Ours is the real server, called through the client library; both
sides run fp32 on the same number of threads, turn by turn, and a ratio is of medians.
"""

import argparse
import json
import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_decode
import cpu_scores
import numpy as np
import report
from agreement import Disagreement
from cpu_frontend import FrontEndLoad
from in_process import InProcessRunner
from interleave import Comparison, Times
from peer_model import hugging_face_folder
from peer_transformers import TransformersPeer
from rich.console import Console
from rich.progress import Progress
from served import Served

from stemserve.service.bench.server_process import ServerFailed, serving
from stemserve.service.default_model import fetch_default

HERE = Path(__file__).parent
MODELS = HERE.parent / ".cache" / "models"
MAX_STEP_TOKENS = 2048
SERVED_METRICS = (
    "score_vs_padded",
    "score_vs_shared_kv",
    "tpot_vs_transformers",
    "warm_vs_items",
)
METRICS = (*SERVED_METRICS, "frontend_calls_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    padded: int  # the slow one
    others: int
    front_end_calls: int


FULL = Repeats(padded=3, others=7, front_end_calls=3_000)
QUICK = Repeats(padded=1, others=2, front_end_calls=500)


class CpuBench:
    """Runs the metrics that are asked for; collects ratios for the last line and all details."""

    def __init__(self, model: Path, options: argparse.Namespace, console: Console) -> None:
        self.ratios: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self._model = model
        self._threads: int = options.threads
        self._repeats = QUICK if options.quick else FULL
        self._rng = np.random.default_rng(options.seed)
        self._console = console

    def run(self, metrics: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder)
            if wanted := [metric for metric in SERVED_METRICS if metric in metrics]:
                with ExitStack() as stack:
                    self._run_served(wanted, stack, logs / "server.log")
            if "frontend_calls_per_s" in metrics:
                self._front_end(logs / "front-end.log")

    def _run_served(self, metrics: list[str], stack: ExitStack, log: Path) -> None:
        self._console.print(f"starting the server and the peer, {self._threads} threads each")
        options = ["--model", str(self._model), "--threads", str(self._threads)]
        options += ["--max-step-tokens", str(MAX_STEP_TOKENS), "--dtype", "float32"]
        served = stack.enter_context(Served(stack.enter_context(serving(options, log=log))))
        peer = TransformersPeer(hugging_face_folder(self._model), threads=self._threads)
        for metric in metrics:
            match metric:
                case "score_vs_padded":
                    self._score_vs_padded(served, peer)
                case "score_vs_shared_kv":
                    self._score_vs_shared_kv(served, peer)
                case "tpot_vs_transformers":
                    self._tpot(served, peer)
                case _:
                    self._warm_vs_items(served)

    def _score_vs_padded(self, served: Served, peer: TransformersPeer) -> None:
        comparison = cpu_scores.cold_prefix(served, peer, self._rng)
        times = self._compare("score_vs_padded", comparison, self._repeats.padded)
        self._ratio("score_vs_padded", times, cpu_scores.PADDED, cpu_scores.OURS)

    def _score_vs_shared_kv(self, served: Served, peer: TransformersPeer) -> None:
        comparison = cpu_scores.warm_prefix(served, peer, self._rng)
        times = self._compare("score_vs_shared_kv", comparison, self._repeats.others)
        # The peer's better form, whichever it is today.
        best = min((cpu_scores.COPIED, cpu_scores.PREALLOCATED), key=times.median)
        self._ratio("score_vs_shared_kv", times, best, cpu_scores.OURS)

    def _tpot(self, served: Served, peer: TransformersPeer) -> None:
        comparison = cpu_decode.token_times(served, peer, self._rng)
        times = self._compare("tpot_vs_transformers", comparison, self._repeats.padded)
        self._ratio("tpot_vs_transformers", times, cpu_decode.COPIED, cpu_decode.OURS)
        preallocated = "tpot_vs_transformers_preallocated"
        self._ratio(preallocated, times, cpu_decode.PREALLOCATED, cpu_decode.OURS)

    def _warm_vs_items(self, served: Served) -> None:
        runner = InProcessRunner(
            self._model, threads=self._threads, max_step_tokens=MAX_STEP_TOKENS
        )
        comparison = cpu_scores.served_or_not(served, runner, self._rng)
        times = self._compare("warm_vs_items", comparison, self._repeats.others)
        self._ratio("warm_vs_items", times, cpu_scores.OURS, cpu_scores.IN_PROCESS)

    def _front_end(self, log: Path) -> None:
        load = FrontEndLoad(
            model=self._model, calls=self._repeats.front_end_calls, repeats=self._repeats.padded
        )
        with self._progress() as progress:
            rates = load.measure(log=log, progress=progress)
        self.details["frontend_calls_per_s"] = rates
        self.ratios["frontend_calls_per_s"] = rates["unary_calls_per_s"]["median"]
        self.ratios["frontend_stream_calls_per_s"] = rates["stream_calls_per_s"]["median"]
        self._console.print(f"front end: {json.dumps(rates)}")

    def _compare(self, metric: str, comparison: Comparison[Any], repeats: int) -> Times:
        with self._progress() as progress:
            times = comparison.run(repeats=repeats, progress=progress)
        self.details[metric] = times.summary()
        self._console.print(times.text(comparison.title), soft_wrap=True)
        return times

    def _ratio(self, metric: str, times: Times, above: str, below: str) -> None:
        self.ratios[metric] = round(times.median(above) / times.median(below), 3)

    def _progress(self) -> Progress:
        return Progress(console=self._console, transient=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repeats: a rehearsal")
    parser.add_argument("--only", action="append", choices=METRICS, help="may be given again")
    parser.add_argument("--threads", type=int, default=2, help="of ours and of the peer")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.add_argument("--model", type=Path, help="GGUF file (default: fetched once)")
    parser.add_argument("--output", type=Path, help="write a result file with machine facts")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    console = Console(stderr=True)
    model = options.model or fetch_default(MODELS, progress=console.print)
    bench = CpuBench(model, options, console)
    try:
        bench.run(options.only or list(METRICS))
    except Disagreement as error:
        sys.exit(f"no speed is reported: {error}")
    except ServerFailed as error:
        sys.exit(str(error))
    if options.output:
        command = shlex.join(["make", "bench-cpu", f"ARGS={shlex.join(sys.argv[1:])}"])
        results = {"ratios": bench.ratios, **bench.details}
        report.write(options.output, command=command, threads=options.threads, results=results)
    print(json.dumps(bench.ratios))


if __name__ == "__main__":
    main()
