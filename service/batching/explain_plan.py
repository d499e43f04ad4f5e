"""The steps that a job would take if nothing else ran, planned by a batcher of its own."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.steps.plan_arrays import pack_float32, pack_int32, unpack_int32
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import Event, GenerateJob, Int32, Job, stored_sequences

# A plan, and for each node of its forest how many of its tokens are in the cache.
ExplainedPlan = tuple[worker_pb2.StepPlan, Int32]


class PlanningBatcher(Protocol):
    def plan_step(self) -> worker_pb2.StepPlan | None: ...
    def apply(self, result: worker_pb2.StepResult) -> list[Event]: ...


def copy_residents(job: Job, source: KvCache, target: KvCache) -> Int32:
    """Put what `source` holds of the job's contexts into `target`; returns tokens by page."""
    for tokens, realm in stored_sequences(job):
        resident = tokens[: source.resident_tokens(tokens, realm)]
        step = StepBuilder(0, page_size=target.page_size, max_rows=0)
        chain = target.acquire(resident, realm, step, own_tail=True) if len(resident) else None
        step.finish(target.tree.release)
        if chain is not None:
            for node in chain.nodes:
                node.planned = node.size
            target.tree.release(chain.nodes)
    cached = np.zeros(target.allocator.num_pages, np.int32)
    for node in target.tree.nodes():
        cached[node.page] = node.planned
    return cached


def explain_steps(
    job: Job, batcher: PlanningBatcher, cached: Int32, *, page_size: int, num_classes: int
) -> Iterator[ExplainedPlan]:
    """All steps of a Score job that `batcher` has; those of a Generate job up to its first decode
    step."""
    while (plan := batcher.plan_step()) is not None:
        yield plan, _cached_tokens(plan, cached, page_size)
        if isinstance(job, GenerateJob):
            if worker_pb2.SEGMENT_KIND_DECODE in unpack_int32(plan.segment_kind):
                return
        else:
            batcher.apply(_blank_result(plan, num_classes))


def _cached_tokens(plan: worker_pb2.StepPlan, cached: Int32, page_size: int) -> Int32:
    """Of each node; also takes what the plan writes out of `cached`."""
    indptr = unpack_int32(plan.node_page_indptr)
    pages = unpack_int32(plan.node_pages)
    counts = np.diff(indptr)
    if not len(pages):
        return np.zeros(0, np.int32)
    for source, target, tokens in unpack_int32(plan.copies).reshape(-1, 3).tolist():
        cached[target] = min(tokens, int(cached[source]))
    slots = unpack_int32(plan.kv_slots)
    written = slots[slots >= 0]
    np.minimum.at(cached, written // page_size, written % page_size)
    filled = np.full(len(pages), page_size, np.int32)
    filled[indptr[1:] - 1] = unpack_int32(plan.node_tokens) - (counts - 1) * page_size
    tokens_in_node: Int32 = np.add.reduceat(np.minimum(cached[pages], filled), indptr[:-1])
    return tokens_in_node


def _blank_result(plan: worker_pb2.StepPlan, num_classes: int) -> worker_pb2.StepResult:
    gathers = len(unpack_int32(plan.gather_rows))
    ids = len(unpack_int32(plan.gather_ids))
    classified = len(unpack_int32(plan.classify_rows))
    return worker_pb2.StepResult(
        step_id=plan.step_id,
        gather_logprobs=pack_float32(np.zeros(ids, np.float32)),
        gather_argmax=pack_int32(np.zeros(gathers, np.int32)),
        class_scores=pack_float32(np.zeros(classified * num_classes, np.float32)),
    )
