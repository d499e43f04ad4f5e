"""One run of the benchmark with its progress on the terminal, and the table at its end."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stemserve.service.bench.peer import StartPeer
from stemserve.service.bench.result import Entry, Result
from stemserve.service.bench.suite import Suite, SuitePlan


def run(
    plan: SuitePlan,
    facts: dict[str, Any],
    *,
    console: Console,
    start_peer: StartPeer | None = None,
) -> Result:
    """Raises ServerFailed, ClientFailed or ClientError; what was measured before is written."""
    result = Result(facts=facts)
    with _progress(console, plan) as (doing, advance):

        def done(entry: Entry) -> None:
            console.print(_line(entry), highlight=False, soft_wrap=True)
            advance()

        Suite(plan, result, doing=doing, done=done, start_peer=start_peer).run()
    result.write(plan.output)
    return result


@contextlib.contextmanager
def _progress(
    console: Console, plan: SuitePlan
) -> Generator[tuple[Callable[[str], None], Callable[[], None]]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(plan.rows) + bool(plan.open_loop))
        yield (
            lambda text: progress.update(task, description=text),
            lambda: progress.advance(task),
        )


def _line(entry: Entry) -> str:
    peer = f"{entry['peer']} {entry['peer_ms']} ms" if entry["peer_ms"] else entry["why_no_peer"]
    failed = f", {entry['failures']} failures: {entry['first_failure']}"
    goal = f" (goal {entry['goal_ms']})" if entry["goal_ms"] is not None else ""
    return (
        f"{entry['name']}: {entry['ours_ms']} ms{goal}, {peer}{failed if entry['failures'] else ''}"
    )


def report(result: Result, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("row", "ours", "peer", "floor", "goal", "p99", "outside engine", "failures"):
        is_name = name == "row"
        table.add_column(name, justify="left" if is_name else "right", no_wrap=is_name)
    for row in (*result.rows, *result.unshared):
        names = ("ours_ms", "peer_ms", "floor_ms", "goal_ms", "p99_ms")
        shown = [row.get(name) for name in names]
        cells = [*shown, row.get("outside_engine_ms"), row["failures"]]
        table.add_row(
            row["name"],
            *("-" if cell is None else f"{cell:g}" for cell in cells),
            style=None if row["at_goal"] in (True, None) else "yellow",
        )
    console.print(
        "milliseconds: a call of a Score row, a token of a Generate row, all of an unshared row",
        style="dim",
    )
    console.print(table)
    if result.open_loop:
        for level in result.open_loop["levels"]:
            latency = level["latency"] or {"p50": None, "p99": None}
            console.print(
                f"open loop, {level['asked_items_per_s']:.0f} items/s asked: "
                f"{level['items_per_s']:.0f} scored, P50 {latency['p50']} ms, "
                f"P99 {latency['p99']} ms, {level['failures']} failures"
            )
    if result.left_out:
        console.print(f"no time was left for {', '.join(result.left_out)}", style="yellow")
    for name, value in result.summary.items():
        console.print(f"{name}: {value}", highlight=False)
