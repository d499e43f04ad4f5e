"""The command that measures a server."""

import secrets
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from http.client import HTTPException
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stemserve.service.bench.client_pool import ClientFailed
from stemserve.service.bench.facts import facts, results_file
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.open_loop import OpenLoop
from stemserve.service.bench.rows import BASELINES, UNSHARED, Row, chosen, for_server
from stemserve.service.bench.run import report, run
from stemserve.service.bench.scrape import scrape
from stemserve.service.bench.server_process import ServerFailed
from stemserve.service.bench.suite import Running, SuitePlan
from stemserve.service.bench.target import FULL, QUICK, describe
from stemserve.service.client.errors import ClientError
from stemserve.service.commands.call import check_server
from stemserve.service.commands.failure import fail, fail_call

METRICS = "http://HOST:9400/metrics"
QUICK_SECONDS = 3.0  # of a rate of the open loop


class SuiteName(StrEnum):
    BASELINES = "baselines"  # the rows and the open loop
    OPEN_LOOP = "open-loop"


def bench(
    suite: Annotated[
        SuiteName,
        typer.Option(
            help="baselines: every row (Score calls with new prefixes, Generate over a stored one, "
            "Generate without anything shared) and the open loop. "
            "open-loop: calls at random moments, at a rising rate."
        ),
    ] = SuiteName.BASELINES,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only rows with such a name; also often. See --list."),
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Print the names and end.")] = False,
    server: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Measure this server instead of starting some."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Its metrics, as {METRICS}; without it there is no GPU-idle.",
        ),
    ] = None,
    serve_options: Annotated[
        str,
        typer.Option(metavar="OPTIONS", help='Of the servers it starts: "--threads 2 --dtype ..."'),
    ] = "",
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds Qwen3-0.6B/ and Qwen3-4B/; without it weights are random."
        ),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=1, help="Processes that call; more where one is the bottleneck.")
    ] = 4,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats and shorter rates.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Of the token ids; a fresh one if absent.", min=0)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Instead of benchmarks/results/<gpu>/engine.json, and a .csv."
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the log of the servers here.")
    ] = None,
) -> None:
    """Measure a server through gRPC with token ids; write benchmarks/results/<gpu>/engine.json.

    For each model it starts `stemserve serve` with random weights, or takes the one of --server.
    A row has the median of its rounds; floors and goals are those of an NVIDIA H200.

    \b
    Examples:
      stemserve bench --suite baselines
      stemserve bench --rows 'score 0.6B*' --quick
      stemserve bench --suite open-loop --server 127.0.0.1:50051 --output mine.json
    """
    loop = OpenLoop(seconds=QUICK_SECONDS) if quick else OpenLoop()
    every_row = (*BASELINES, *UNSHARED)
    if list_rows:
        print(*(row.name for row in (*every_row, loop)), sep="\n")
        return
    only_loop = suite is SuiteName.OPEN_LOOP
    _check(server, metrics, output)
    wanted: tuple[Row, ...] = () if only_loop else chosen(every_row, rows or ())
    loops = (loop,) if only_loop else chosen((loop,), rows or ())
    if not wanted and not loops:
        fail(f"no row is named {', '.join(rows or ())}; --list prints the names")
    plan = SuitePlan(
        rows=wanted,
        open_loop=loops[0] if loops else None,
        output=output or results_file(),
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
        clients=clients,
        repeats=QUICK if quick else FULL,
        serve_options=_words(serve_options),
        folders=checkpoints,
        random_weights=checkpoints is None,
        log=log,
    )
    try:
        if server is not None:
            plan = of_server(plan, Running(address=server, metrics_url=metrics))
        console = Console(stderr=True)
        command = "stemserve " + shlex.join(sys.argv[1:])
        result = run(plan, facts(seed=plan.seed, command=command), console=console)
    except (ServerFailed, ClientFailed) as error:
        fail(str(error))
    except ClientError as error:
        fail_call(error, server or "the server that was started")
    report(result, Console())
    print(f"wrote {plan.output}")


def _check(server: str | None, metrics: str | None, output: Path | None) -> None:
    """Before minutes are spent."""
    if server is not None:
        check_server(server)
    if metrics is not None:
        if not metrics.startswith(("http://", "https://")):
            raise typer.BadParameter(f"--metrics {metrics!r} is not a URL, as {METRICS}")
        try:
            scrape(metrics)
        except (OSError, ValueError, HTTPException) as error:
            fail(f"--metrics {metrics}: {error}")
    if output is not None and output.is_dir():
        raise typer.BadParameter(f"--output {output} is a folder; name a file in it")


def _words(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise typer.BadParameter(f"--serve-options {options!r}: {error}") from error


def of_server(plan: SuitePlan, server: Running) -> SuitePlan:
    """The plan for a server that runs. Raises ClientError."""
    model = describe(server.address).model
    names = {key: shape.name for key, shape in SHAPES.items()}
    loop = plan.open_loop
    return replace(
        plan,
        server=server,
        rows=for_server(model, plan.rows, names),
        open_loop=replace(loop, model=model) if loop else None,
    )
