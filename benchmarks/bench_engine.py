"""Ours through gRPC and a peer, row by row, on one GPU: `make bench-engine ARGS='--peer vllm'`.

The rows and the harness are those of `stemserve bench`. With a peer, both engines load the same
random weights from a checkpoint and share the GPU's memory; they take turns, a row each. A peer's
time counts where its log-probabilities agree with ours. Writes results/<gpu>/engine.json and .csv
under benchmarks, and pictures where matplotlib is installed.
"""

import argparse
import secrets
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import plot_engine
from engine_peer import PeerOptions, StartEngine
from rich.console import Console

from stemserve.service.bench.client_pool import ClientFailed
from stemserve.service.bench.facts import facts, results_file
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.open_loop import OpenLoop
from stemserve.service.bench.rows import BASELINES, UNSHARED, Row, chosen
from stemserve.service.bench.run import report, run
from stemserve.service.bench.server_process import ServerFailed
from stemserve.service.bench.suite import SuitePlan
from stemserve.service.bench.target import FULL, QUICK
from stemserve.service.client import ClientError

HERE = Path(__file__).parent
SCRIPTS = {"vllm": "vllm_engine.py", "sglang": "sglang_engine.py"}
GIB = 1 << 30
QUICK_SECONDS = 3.0  # of a rate of the open loop
# With a peer, each engine has so much KV, and room for what its steps need beside it.
KV_BYTES = 12 * GIB
PEER_MEMORY = 0.2  # of the GPU, weights and steps included


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_peer(parser)
    parser.add_argument(
        "--rows", action="append", metavar="GLOB", help="only rows with such a name; also often"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and shorter rates")
    parser.add_argument("--seed", type=int, help="of the token ids; a fresh one by default")
    parser.add_argument("--clients", type=int, default=4, help="processes that call ours")
    parser.add_argument(
        "--serve-options", default="", metavar="WORDS", help="of stemserve serve, in one argument"
    )
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="of Qwen3-0.6B/ and Qwen3-4B/; else random"
    )
    parser.add_argument(
        "--start-seconds", type=float, default=600.0, metavar="S",
        help="how long an engine may take to start",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S",
        help="from the first row's start: no row starts later",
    )  # fmt: skip
    parser.add_argument(
        "--hold", type=Path, metavar="FILE", help="start everything, then wait for such a file"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the engines' logs there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of engine.json")
    return parser.parse_args()


def _add_peer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", choices=("none", *SCRIPTS), default="none")
    parser.add_argument(
        "--peer-python", default=sys.executable, metavar="FILE", help="of the peer's environment"
    )
    parser.add_argument("--peer-path", default="", metavar="PATH", help="PYTHONPATH of that Python")
    parser.add_argument(
        "--peer-options", default="", metavar="WORDS", help="of the peer's script, in one argument"
    )
    parser.add_argument(
        "--fallback-options", default="", metavar="WORDS",
        help="added where ours does not start beside a peer, as --no-cuda-graphs; noted",
    )  # fmt: skip


def write_checkpoints(models: tuple[str, ...], parent: Path, console: Console) -> Path:
    """In a process of its own, whose GPU memory goes with it."""
    folders = [str(SHAPES[model].write(parent)) for model in models]
    console.print(f"writing random weights of {', '.join(models)}")
    script = [sys.executable, str(HERE / "random_checkpoint.py"), *folders]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
    return parent


def suite_plan(
    options: argparse.Namespace, rows: tuple[Row, ...], folders: Path | None, logs: Path
) -> SuitePlan:
    loops = chosen(
        (OpenLoop(seconds=QUICK_SECONDS) if options.quick else OpenLoop(),), options.rows
    )
    serve_options = shlex.split(options.serve_options)
    if options.peer != "none" and not any(word.startswith("--kv-") for word in serve_options):
        serve_options += ["--kv-memory", str(KV_BYTES)]
    return SuitePlan(
        rows=rows,
        open_loop=loops[0] if loops else None,
        output=options.output or HERE.parent / results_file(),
        seed=secrets.randbelow(1 << 31) if options.seed is None else options.seed,
        clients=options.clients,
        repeats=QUICK if options.quick else FULL,
        serve_options=serve_options,
        folders=folders,
        random_weights=options.checkpoints is None,  # as they are in what the peer loads
        log=logs / "server.log",
        fallback_words=shlex.split(options.fallback_options),
        start_s=options.start_seconds,
        together=options.peer != "none",
        hold=options.hold,
        seconds=options.seconds,
    )


def main() -> int:
    options = parse_options()
    options.rows = options.rows or []
    if options.list:
        print(*(row.name for row in (*BASELINES, *UNSHARED, OpenLoop())), sep="\n")
        return 0
    rows = chosen((*BASELINES, *UNSHARED), options.rows)
    console = Console(stderr=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = options.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        start_peer, folders = None, options.checkpoints
        if options.peer != "none" and rows:
            models = tuple(dict.fromkeys(row.model for row in rows))
            folders = folders or write_checkpoints(models, work, console)
            start_peer = StartEngine(options=peer_options(options, logs))
        plan = suite_plan(options, rows, folders, logs)
        if not plan.rows and plan.open_loop is None:
            print(f"no row is named {', '.join(options.rows)}; see --list", file=sys.stderr)
            return 2
        command = "make bench-engine ARGS=" + shlex.quote(shlex.join(sys.argv[1:]))
        known = facts(seed=plan.seed, command=command)
        try:
            result = run(plan, known, console=console, start_peer=start_peer)
        except (ServerFailed, ClientFailed, ClientError) as error:
            print(error, file=sys.stderr)
            return 1
    report(result, Console())
    print(f"wrote {plan.output}", *plot_engine.draw(plan.output), sep="\n")
    return 0


def peer_options(options: argparse.Namespace, logs: Path) -> PeerOptions:
    longest = max(shape.context_tokens for shape in SHAPES.values())
    words = ["--memory", str(PEER_MEMORY), "--max-model-len", str(longest)]
    if options.peer == "vllm":
        words += ["--kv-bytes", str(KV_BYTES)]
    return PeerOptions(
        name=options.peer,
        python=options.peer_python,
        path=options.peer_path,
        script=HERE / SCRIPTS[options.peer],
        words=(*words, *shlex.split(options.peer_options)),
        logs=logs,
        rounds=2 if options.quick else 4,
        start_s=options.start_seconds,
    )


if __name__ == "__main__":
    raise SystemExit(main())
