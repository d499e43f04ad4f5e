"""Small steps before the first real one: first calls allocate, pick algorithms and compile."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from stemserve.kernels.strategy import CompilesAhead, Kernel, Phase, Strategy
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import encode_int32
from stemserve.worker.choice.dispatch import KERNEL_CODES
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.step import decode_step

log = logging.getLogger(__name__)

PAGES = 3  # that these steps write to
ITEM_ROWS = 3


class Runs(Protocol):
    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult: ...


def warm_up(
    runner: Runs,
    limits: StepLimits,
    strategies: Mapping[tuple[Phase, Kernel], Strategy],
) -> None:
    """Runs each of the strategies, so that none is compiled while a call waits.

    Writes into the first pages, which nobody has yet.
    """
    started = time.perf_counter()
    runner.step(prompt_plan(limits))
    ran = [strategy.kernel for strategy in strategies.values() if _run(strategy, runner, limits)]
    log.info("warm-up took %.2f s; ran %s", time.perf_counter() - started, ", ".join(ran) or "one")


def _run(strategy: Strategy, runner: Runs, limits: StepLimits) -> bool:
    if isinstance(strategy, CompilesAhead):
        strategy.compile_ahead()
    plan = trees_plan(limits) if strategy.phase is Phase.PREFILL else decode_plan(limits)
    if limits.kv_pages < PAGES or len(plan.token_ids) // 4 > limits.max_step_tokens:
        return False
    if strategy.refusal(decode_step(plan, limits).layout) is not None:
        return False
    segments = len(plan.segment_kind) // 4
    plan.segment_kernel = _packed([KERNEL_CODES[strategy.kernel]] * segments)
    runner.step(plan)
    return True


def prompt_plan(limits: StepLimits) -> worker_pb2.StepPlan:
    """A prompt of a page, read at its last row."""
    rows = min(limits.page_size, limits.context_tokens, limits.max_step_tokens)
    plan = worker_pb2.StepPlan(
        token_ids=_packed([0] * rows),
        positions=_packed(range(rows)),
        kv_slots=_packed(range(rows)),
        segment_indptr=_packed([0, rows]),
        segment_kind=_packed([worker_pb2.SEGMENT_KIND_PREFILL]),
        segment_node=_packed([0]),
        segment_kernel=_packed([0]),
        node_parent=_packed([-1]),
        node_page_indptr=_packed([0, 1]),
        node_pages=_packed([0]),
        node_tokens=_packed([rows]),
    )
    if limits.has_lm_head:
        plan.gather_rows = _packed([rows - 1])
        plan.gather_indptr = _packed([0, 1])
        plan.gather_ids = _packed([0])
    if limits.classes:
        plan.classify_rows = _packed([rows - 1])
    return plan


def trees_plan(limits: StepLimits) -> worker_pb2.StepPlan:
    """Two contexts, each with two items."""
    size = limits.page_size
    lengths = [size, max(1, size // 2)]
    kinds, nodes, rows = list[int](), list[int](), list[int]()
    positions, slots = list[int](), list[int]()
    for node, length in enumerate(lengths):
        kinds.append(worker_pb2.SEGMENT_KIND_PREFILL)
        rows.append(length)
        positions += range(length)
        slots += range(node * size, node * size + length)
        kinds += [worker_pb2.SEGMENT_KIND_ITEM] * 2
        rows += [ITEM_ROWS, 1]
        positions += [*range(length, length + ITEM_ROWS), length]
        slots += [-1] * (ITEM_ROWS + 1)
        nodes += [node] * 3
    return worker_pb2.StepPlan(
        token_ids=_packed([0] * sum(rows)),
        positions=_packed(positions),
        kv_slots=_packed(slots),
        segment_indptr=_packed(np.cumsum([0, *rows]).tolist()),
        segment_kind=_packed(kinds),
        segment_node=_packed(nodes),
        segment_kernel=_packed([0] * len(rows)),
        node_parent=_packed([-1, -1]),
        node_page_indptr=_packed([0, 1, 2]),
        node_pages=_packed([0, 1]),
        node_tokens=_packed(lengths),
    )


def decode_plan(limits: StepLimits) -> worker_pb2.StepPlan:
    """Two rows below one page."""
    size = limits.page_size
    return worker_pb2.StepPlan(
        token_ids=_packed([0, 0]),
        positions=_packed([size, size]),
        kv_slots=_packed([size, 2 * size]),
        segment_indptr=_packed([0, 1, 2]),
        segment_kind=_packed([worker_pb2.SEGMENT_KIND_DECODE] * 2),
        segment_node=_packed([1, 2]),
        segment_kernel=_packed([0, 0]),
        node_parent=_packed([-1, 0, 0]),
        node_page_indptr=_packed([0, 1, 2, 3]),
        node_pages=_packed([0, 1, 2]),
        node_tokens=_packed([size, 1, 1]),
    )


def _packed(values: Sequence[int]) -> bytes:
    return encode_int32(np.asarray(values, np.int32))
