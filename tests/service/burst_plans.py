"""A burst taken apart into the steps that it stands for, and their results put together."""

from collections.abc import Iterator

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import pack_int32, unpack_int32
from stemserve.service.request import Int32

PAGE = 16
DECODE = worker_pb2.SEGMENT_KIND_DECODE


def sub_steps(plan: worker_pb2.StepPlan) -> Iterator[worker_pb2.StepPlan]:
    """One after another; rows that count no more are left out, with their leaves' growth."""
    rows = len(unpack_int32(plan.token_ids))
    steps = unpack_int32(plan.row_steps)
    slots = unpack_int32(plan.kv_slots).reshape(plan.repeat, rows)
    leaves = unpack_int32(plan.segment_node)
    assert len(steps) == rows == len(leaves) and 1 <= steps.min() <= steps.max() <= plan.repeat
    assert (unpack_int32(plan.segment_kind) == DECODE).all()
    assert not plan.gather_rows and not plan.classify_rows
    assert unpack_int32(plan.sample_rows).tolist() == list(range(rows))
    assert len(set(leaves.tolist())) == rows
    assert not set(leaves.tolist()) & set(unpack_int32(plan.node_parent).tolist())
    assert ((slots >= 0) == (np.arange(plan.repeat)[:, None] < steps)).all()
    for number in range(plan.repeat):
        yield _sub_step(plan, number, np.flatnonzero(steps > number).astype(np.int32), slots)


def _sub_step(
    plan: worker_pb2.StepPlan, number: int, rows: Int32, slots: Int32
) -> worker_pb2.StepPlan:
    """Of the rows that count in it."""
    step = worker_pb2.StepPlan()
    step.CopyFrom(plan)
    leaves = unpack_int32(plan.segment_node)
    tokens = unpack_int32(plan.node_tokens).copy()
    tokens[leaves] += np.minimum(number, unpack_int32(plan.row_steps) - 1)
    indptr, pages = unpack_int32(plan.node_page_indptr), unpack_int32(plan.node_pages)
    filled = [
        pages[first : first + -(-count // PAGE)]
        for first, count in zip(indptr[:-1].tolist(), tokens.tolist(), strict=True)
    ]
    step.node_tokens = pack_int32(tokens)
    step.node_page_indptr = pack_int32([0, *np.cumsum([len(part) for part in filled])])
    step.node_pages = pack_int32(np.concatenate(filled))
    if number:
        step.ClearField("copies")
        step.ClearField("samplers")
        step.token_ids = pack_int32(-1 - unpack_int32(plan.sample_slots)[rows])
    step.positions = pack_int32(unpack_int32(plan.positions)[rows] + number)
    step.kv_slots = pack_int32(slots[number, rows])
    step.segment_indptr = pack_int32(range(len(rows) + 1))
    step.segment_kind = pack_int32([DECODE] * len(rows))
    step.segment_node = pack_int32(leaves[rows])
    step.segment_kernel = pack_int32(unpack_int32(plan.segment_kernel)[rows])
    step.sample_rows = pack_int32(range(len(rows)))
    step.sample_slots = pack_int32(unpack_int32(plan.sample_slots)[rows])
    step.sample_index = pack_int32(unpack_int32(plan.sample_index)[rows] + number)
    return step


def joined(
    results: list[worker_pb2.StepResult], plan: worker_pb2.StepPlan
) -> worker_pb2.StepResult:
    """What rows that count no more drew is rubbish."""
    steps = unpack_int32(plan.row_steps)
    rows = len(steps)
    tokens = np.full((plan.repeat, rows), -12345, np.int32)
    logprobs = np.full((plan.repeat, rows), np.nan, np.float32)
    failed: list[int] = []
    for number, result in enumerate(results):
        counting = np.flatnonzero(steps > number)
        tokens[number, counting] = unpack_int32(result.sampled_tokens)
        logprobs[number, counting] = np.frombuffer(result.sampled_logprobs, "<f4")
        failed += (counting[unpack_int32(result.failed_rows)] + number * rows).tolist()
    whole = results[0]
    whole.sampled_tokens = tokens.astype("<i4").tobytes()
    whole.sampled_logprobs = logprobs.astype("<f4").tobytes()
    whole.failed_rows = pack_int32(failed)
    whole.step_seconds = sum(result.step_seconds for result in results)
    return whole
