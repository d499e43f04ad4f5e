"""The sections of a run, each a list of rows for kernels.json."""

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from choices import Choices, worth_timing
from decode_engines import Engine, strategy_engine
from decode_section import measure, plan_times
from division_section import division_rows
from dram_section import NoCounters, dram_rows
from kernel_summary import engine_us, regret
from kernel_trees import Case, repaged
from prefill_section import measure_shape
from prefill_shapes import PrefillShape

from stemserve.kernels.strategy import Kernel, Phase
from stemserve.worker.dispatch import Prediction

Row = dict[str, Any]

DECODE, PREFILL, DIVISION, PLANS, DRAM = "decode", "prefill", "division", "plans", "dram"
SECTIONS = (DECODE, PREFILL, DIVISION, PLANS, DRAM)
PLANNED_REQUESTS = (64, 1024)
TABLE_ONLY = ("flex",)  # compiled anew for other heads


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

    @property
    def steps(self) -> int:
        counts = {
            DECODE: len(self.table) + len(self.trees),
            PREFILL: len(self.shapes),
            DIVISION: 1,
            PLANS: 1,
            DRAM: 1,
        }
        return sum(counts[section] for section in self.sections)


@dataclass(kw_only=True)
class Measured:
    table: list[Row] = field(default_factory=list)
    trees: list[Row] = field(default_factory=list)
    shapes: list[Row] = field(default_factory=list)
    division: list[Row] = field(default_factory=list)
    plans: list[Row] = field(default_factory=list)
    dram: list[Row] = field(default_factory=list)
    no_dram: str | None = None


def run_sections(
    plan: RunPlan, before: Callable[[str], None], after: Callable[[Measured], None]
) -> Measured:
    """`before` is told what comes next, `after` gets what there is after each section."""
    measured = Measured()
    gc.collect()
    gc.freeze()  # collections while measuring then look at what measuring made
    for section in SECTIONS:
        if section in plan.sections:
            _RUN[section](plan, measured, before)
            after(measured)
    return measured


def _decode(plan: RunPlan, measured: Measured, before: Callable[[str], None]) -> None:
    others = [peer for peer in plan.peers if peer.name not in TABLE_ONLY]
    for cases, rows, peers in (
        (plan.table, measured.table, plan.peers),
        (plan.trees, measured.trees, others),
    ):
        for case in cases:
            before(case.name)
            rows.append(decode_row(case, plan, peers))
            gc.collect()  # FlashInfer's wrappers hold each other


def _prefill(plan: RunPlan, measured: Measured, before: Callable[[str], None]) -> None:
    for shape in plan.shapes:
        before(f"P {shape.prefix} S {shape.item} M {shape.items}")
        measured.shapes.append(measure_shape(shape, plan.choices, plan.rounds))
        gc.collect()


def _division(plan: RunPlan, measured: Measured, before: Callable[[str], None]) -> None:
    before("division")
    measured.division = division_rows(plan.table, plan.rounds)


def _plans(plan: RunPlan, measured: Measured, before: Callable[[str], None]) -> None:
    before("planning")
    measured.plans = plan_rows(plan)


def _dram(plan: RunPlan, measured: Measured, before: Callable[[str], None]) -> None:
    before("DRAM bytes")
    try:
        measured.dram = dram_rows()
    except NoCounters as reason:
        measured.no_dram = str(reason)


_RUN = {DECODE: _decode, PREFILL: _prefill, DIVISION: _division, PLANS: _plans, DRAM: _dram}


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
