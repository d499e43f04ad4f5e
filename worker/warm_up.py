"""One small step before the first real one: first calls allocate, pick algorithms and compile."""

import logging
import time
from collections.abc import Sequence

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import encode_int32
from stemserve.worker.runner import ModelRunner
from stemserve.worker.step_checks import StepLimits

log = logging.getLogger(__name__)


def warm_up(runner: ModelRunner, limits: StepLimits) -> None:
    """Writes into page 0, which nobody has yet."""
    started = time.perf_counter()
    runner.step(prompt_plan(limits))
    log.info("warm-up step took %.2f s", time.perf_counter() - started)


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


def _packed(values: Sequence[int]) -> bytes:
    return encode_int32(np.asarray(values, np.int32))
