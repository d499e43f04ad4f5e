"""The sections of a run, each a list of rows for kernels.json."""

import gc
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from typing import Any

from choices import Choices, worth_timing
from decode_engines import Engine, strategy_engine
from decode_section import measure, plan_times
from division_section import division_rows
from dram_section import NoCounters, dram_rows
from kernel_summary import LEAST_FLOOR_US, engine_us, regret
from kernel_trees import Case, repaged
from prefill_section import measure_shape
from prefill_shapes import PrefillShape

from stemserve.kernels.strategy import Kernel, Phase
from stemserve.worker.choice.dispatch import Prediction

Row = dict[str, Any]

TABLE, PREFILL, TREES = "table", "prefill", "trees"
PLANS, DIVISION, DRAM = "plans", "division", "dram"
SECTIONS = (TABLE, PREFILL, TREES, PLANS, DIVISION, DRAM)
PLANNED_REQUESTS = (64, 1024)
TABLE_ONLY = ("flex", "cascade_auto")  # compiled anew for other heads; far behind everywhere
SAVE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run measures."""

    sections: Collection[str]
    table: list[Case]
    trees: list[Case]
    shapes: list[PrefillShape]
    peers: list[Engine]
    choices: Choices
    rounds: int
    table_only: Collection[str]  # peers that the trees of the file do without
    deadline_s: float  # of time.perf_counter; nothing starts after it


@dataclass(kw_only=True)
class Measured:
    table: list[Row] = field(default_factory=list)
    trees: list[Row] = field(default_factory=list)
    shapes: list[Row] = field(default_factory=list)
    division: list[Row] = field(default_factory=list)
    plans: list[Row] = field(default_factory=list)
    dram: list[Row] = field(default_factory=list)
    no_dram: str | None = None
    late: dict[str, int] = field(default_factory=dict)  # section: what there was no time for


@dataclass(frozen=True, kw_only=True)
class Task:
    section: str
    name: str
    measure: Callable[[], None]


def tasks(plan: RunPlan, measured: Measured) -> list[Task]:
    """What matters most comes first, and two long sections take turns: time may run out."""
    peers = [peer for peer in plan.peers if peer.name not in plan.table_only]
    table = [_tree_task(TABLE, case, plan, measured.table, plan.peers) for case in plan.table]
    trees = [_tree_task(TREES, case, plan, measured.trees, peers) for case in plan.trees]
    long = [case.floor_us >= LEAST_FLOOR_US for case in plan.trees]  # short: in no mean over floors
    turns = zip_longest(
        compress(trees, long), (_shape_task(s, plan, measured) for s in plan.shapes if not s.grid)
    )
    found = [
        *table,
        *(_shape_task(shape, plan, measured) for shape in plan.shapes if shape.grid),
        Task(section=PLANS, name="planning", measure=lambda: _plans(plan, measured)),
        *(task for pair in turns for task in pair if task is not None),
        Task(section=DIVISION, name="division", measure=lambda: _division(plan, measured)),
        Task(section=DRAM, name="DRAM bytes", measure=lambda: _dram(measured)),
        *compress(trees, [not one for one in long]),
    ]
    return [task for task in found if task.section in plan.sections]


def _tree_task(
    section: str, case: Case, plan: RunPlan, rows: list[Row], peers: list[Engine]
) -> Task:
    return Task(
        section=section,
        name=case.name,
        measure=lambda: rows.append(decode_row(case, plan, peers)),
    )


def _shape_task(shape: PrefillShape, plan: RunPlan, measured: Measured) -> Task:
    return Task(
        section=PREFILL,
        name=f"P {shape.prefix} S {shape.item} M {shape.items}",
        measure=lambda: measured.shapes.append(measure_shape(shape, plan.choices, plan.rounds)),
    )


def run_tasks(
    todo: list[Task],
    measured: Measured,
    deadline_s: float,
    before: Callable[[str], None],
    save: Callable[[], None],
) -> None:
    """`before` is told what comes next; `save` is called every few seconds and at the end."""
    saved = time.perf_counter()
    for task in todo:
        before(task.name)
        if time.perf_counter() > deadline_s:
            measured.late[task.section] = measured.late.get(task.section, 0) + 1
            continue
        task.measure()
        gc.collect()  # FlashInfer's wrappers hold each other
        if time.perf_counter() - saved > SAVE_EVERY_S:
            save()
            saved = time.perf_counter()
    save()


def _division(plan: RunPlan, measured: Measured) -> None:
    measured.division = division_rows(plan.table, plan.rounds)


def _plans(plan: RunPlan, measured: Measured) -> None:
    measured.plans = plan_rows(plan)


def _dram(measured: Measured) -> None:
    try:
        measured.dram = dram_rows()
    except NoCounters as reason:
        measured.no_dram = str(reason)


def decode_row(case: Case, plan: RunPlan, peers: list[Engine]) -> Row:
    """All strategies worth timing and all peers on a tree, and dispatch's choice."""
    # What dispatch sees has whole pages in inner nodes, as the allocator makes them.
    layout = repaged(case, case.layout.page_size).case.layout
    predictions = plan.choices.predictions(Phase.DECODE, layout, case.shape)
    kernels = [found.kernel for found in worth_timing(predictions)]
    if Kernel.CODEC not in kernels:
        kernels.append(Kernel.CODEC)
    own = [strategy_engine(kernel, plan.choices.strategies) for kernel in kernels]
    row = measure(case, [*own, *peers], plan.rounds)
    times = {engine.name: us for engine in own if (us := engine_us(row, engine.name)) is not None}
    chosen = str(predictions[0].kernel)
    return row | {
        "chosen": chosen,
        "regret": regret(times, chosen),
        "predicted_us": {str(found.kernel): _predicted(found) for found in predictions},
    }


def _predicted(found: Prediction) -> float | str:
    if found.refusal is not None:
        return found.refusal
    return float(f"{found.seconds * 1e6:.5g}")


def plan_rows(plan: RunPlan) -> list[Row]:
    rows: list[Row] = []
    for case in [*plan.table, *plan.trees]:
        requests = len(case.leaves)
        if requests in PLANNED_REQUESTS:
            codec = plan.choices.strategies(case.shape)[Phase.DECODE, Kernel.CODEC]
            rows.append({"tree": case.name, "requests": requests} | plan_times(case, codec))
    return rows
