"""One step of the model: a StepPlan decoded to host arrays and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_int32
from stemserve.worker.sampling.params import SamplerParams, TokenMask, decode_masks, decode_sampler
from stemserve.worker.steps.burst import (
    check_burst_rows,
    decode_row_steps,
    layout_ahead,
    longest_layout,
    tokens_ahead,
)
from stemserve.worker.steps.checks import (
    StepLimits,
    check_forest,
    check_indptr,
    check_layout_rows,
    check_range,
    check_segments,
    check_unique,
)
from stemserve.worker.steps.native_check import (
    ARRAYS,
    ONE_TREE,
    READS_SLOTS,
    RIGHT,
    SLOTS_ASCEND,
    native_check,
)
from stemserve.worker.steps.reads import (
    Gathers,
    Samples,
    decode_classify_rows,
    decode_samples,
    gathers_of,
)

PREFILL = worker_pb2.SEGMENT_KIND_PREFILL
DECODE = worker_pb2.SEGMENT_KIND_DECODE
ITEM = worker_pb2.SEGMENT_KIND_ITEM

NONE = np.empty(0, np.int32)
NO_COPIES = NONE.reshape(0, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step, or a burst of `repeat` decode steps: then its arrays are those of sub-step 0."""

    step_id: int
    token_ids: Int32  # [rows] -1 - slot: the token last sampled into that slot
    positions: Int32  # [rows]
    kv_slots: Int32  # [repeat * rows] sub-step by sub-step; -1: not stored
    layout: AttentionLayout  # of all segments and the whole forest; a burst's has all its pages
    segment_kind: Int32  # [segments]
    segment_kernel: Int32  # [segments] forced Kernel; 0: none
    copies: Int32  # [copies, 3] source page, destination page, tokens
    gathers: Gathers
    classify_rows: Int32  # [classified]
    samples: Samples
    samplers: tuple[SamplerParams, ...]
    masks: tuple[TokenMask, ...]  # of some of the samples; a burst has none
    repeat: int  # 1: no burst
    row_steps: Int32  # [rows] of a burst: sub-steps in which each row counts; else empty
    reads_slots: bool  # some token_ids are below 0
    is_one_tree: bool = False  # known: prefill of one tree, or of none, that reads every node

    @property
    def num_trees(self) -> int:
        return int(np.count_nonzero(self.layout.node_parent < 0))

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def at(self, sub_step: int) -> "Step":
        """A sub-step of a burst as a step of its own; the first has the copies and the samplers."""
        if self.repeat == 1:
            return self
        samples, ahead = self.samples, tokens_ahead(self.row_steps, sub_step)
        first = sub_step * self.num_rows
        step = replace(
            self,
            positions=self.positions + ahead,
            kv_slots=self.kv_slots[first : first + self.num_rows],
            layout=layout_ahead(self.layout, ahead),
            samples=replace(samples, index=samples.index + ahead),
            repeat=1,
            row_steps=NONE,
        )
        if sub_step == 0:
            return step
        return replace(
            step,
            token_ids=-1 - samples.slots,
            copies=NO_COPIES,
            samplers=(),
            reads_slots=True,
        )


def decode_step(plan: worker_pb2.StepPlan, limits: StepLimits) -> Step:
    """Raises BadPlan with the array that is wrong and what is wrong about it."""
    repeat = max(1, plan.repeat)
    if repeat > limits.max_burst_steps:
        raise BadPlan(f"repeat is {repeat}; this worker runs at most {limits.max_burst_steps}")
    blobs = [getattr(plan, name) for name in ARRAYS]
    arrays = dict(zip(ARRAYS, map(decode_int32, ARRAYS, blobs), strict=True))
    check = native_check(limits) if repeat == 1 else None
    known = 0 if check is None else check(blobs)
    token_ids, kind = arrays["token_ids"], arrays["segment_kind"]
    rows = len(token_ids)
    if not 1 <= rows <= limits.max_step_tokens:
        raise BadPlan(f"the step has {rows} rows; it must have 1..{limits.max_step_tokens}")
    step = Step(
        step_id=plan.step_id,
        token_ids=token_ids,
        positions=arrays["positions"],
        kv_slots=arrays["kv_slots"],
        layout=_layout(arrays, limits.page_size),
        segment_kind=kind,
        segment_kernel=arrays["segment_kernel"],
        copies=_decode_copies(plan.copies, limits),
        gathers=gathers_of(arrays),
        classify_rows=decode_classify_rows(plan.classify_rows, limits, rows),
        samples=decode_samples(plan, limits, rows),
        samplers=_decode_samplers(plan, limits),
        masks=_decode_masks(plan, limits),
        repeat=repeat,
        row_steps=decode_row_steps(plan.row_steps, repeat=repeat, rows=rows),
        reads_slots=bool(known & READS_SLOTS) if known else bool((token_ids < 0).any()),
        is_one_tree=bool(known & ONE_TREE),
    )
    if known & RIGHT:
        if not known & SLOTS_ASCEND:
            _check_slots_differ(step.kv_slots)
    else:
        check_arrays(step, limits)
    _check_reads(step, limits)
    return step


def _layout(arrays: Mapping[str, Int32], page_size: int) -> AttentionLayout:
    return AttentionLayout(
        page_size=page_size,
        node_parent=arrays["node_parent"],
        node_page_indptr=arrays["node_page_indptr"],
        node_pages=arrays["node_pages"],
        node_tokens=arrays["node_tokens"],
        segment_indptr=arrays["segment_indptr"],
        segment_node=arrays["segment_node"],
        segment_is_item=arrays["segment_kind"] == ITEM,
    )


def check_arrays(step: Step, limits: StepLimits) -> None:
    """All that NativeCheck looks at."""
    layout, gathers = step.layout, step.gathers
    _check_rows(step, limits)
    grown = layout
    if len(step.row_steps):
        grown = longest_layout(layout, step.segment_kind, step.row_steps)
    check_forest(grown, limits.kv_pages)
    _check_segment_rows(layout, step.num_rows)
    check_segments(layout, step.segment_kind, step.segment_kernel)
    check_range("gather_rows", gathers.rows, 0, step.num_rows)
    check_indptr("gather_indptr", gathers.indptr, len(gathers.rows), len(gathers.ids))
    check_range("gather_ids", gathers.ids, 0, limits.vocab_size)
    if step.repeat == 1:
        check_layout_rows(layout, step.positions, step.kv_slots)


def _check_rows(step: Step, limits: StepLimits) -> None:
    rows, positions, kv_slots = step.num_rows, step.positions, step.kv_slots
    if len(positions) != rows or len(kv_slots) != step.repeat * rows:
        raise BadPlan(
            f"{rows} token_ids, {len(positions)} positions and {len(kv_slots)} kv_slots "
            f"of {step.repeat} sub-steps differ"
        )
    check_range("token_ids", step.token_ids, -limits.sampler_slots, limits.vocab_size)
    check_range("positions", positions, 0, limits.context_tokens)
    check_range("kv_slots", kv_slots, -1, limits.kv_pages * limits.page_size)
    _check_slots_differ(kv_slots)


def _check_slots_differ(kv_slots: Int32) -> None:
    check_unique("kv_slots", kv_slots[kv_slots >= 0])


def _check_segment_rows(layout: AttentionLayout, rows: int) -> None:
    check_indptr("segment_indptr", layout.segment_indptr, layout.num_segments, rows)
    if (layout.segment_rows < 1).any():
        raise BadPlan("segment_indptr has a segment without rows")


def _check_reads(step: Step, limits: StepLimits) -> None:
    """Who reads what: whether the model has it, what a burst may read, whose masks there are."""
    if len(step.gathers.rows) and not limits.has_lm_head:
        raise BadPlan("gather_rows: the model has no LM head")
    if step.repeat > 1:
        _check_burst(step, limits)
    elif step.masks:
        masked = np.asarray([mask.slot for mask in step.masks], np.int64)
        if not np.isin(masked, step.samples.slots).all():
            raise BadPlan("masks: a slot is not sampled in this step")
        if np.isin(masked, step.samples.drafted_slots).any():
            raise BadPlan("masks: a slot is sampled at several rows")


def _check_burst(step: Step, limits: StepLimits) -> None:
    check_burst_rows(step.layout, step.positions, step.kv_slots, step.row_steps)
    check_range("positions", step.positions + step.row_steps - 1, 0, limits.context_tokens)
    if len(step.gathers.rows) or len(step.classify_rows):
        raise BadPlan("gather_rows and classify_rows: a burst reads nothing but its samples")
    if step.masks:
        raise BadPlan("masks: a burst has none")
    if not np.array_equal(step.samples.rows, np.arange(step.num_rows)):
        raise BadPlan("sample_rows: a burst samples every row once, in order")
    if len(step.samples.drafted_slots):
        raise BadPlan("sample_slots: a burst samples each slot at one row")


def _decode_copies(blob: bytes, limits: StepLimits) -> Int32:
    if not blob:
        return NO_COPIES
    flat = decode_int32("copies", blob)
    if len(flat) % 3:
        raise BadPlan(f"copies has {len(flat)} numbers, which is not a multiple of 3")
    copies = flat.reshape(-1, 3)
    check_range("copies: pages", copies[:, :2], 0, limits.kv_pages)
    check_range("copies: tokens", copies[:, 2], 1, limits.page_size + 1)
    destinations = set[int](copies[:, 1].tolist())
    if len(destinations) < len(copies):
        check_unique("copies: destination pages", copies[:, 1])
    # Copies run as one gather and one scatter: a page cannot be both ends.
    if not destinations.isdisjoint(copies[:, 0].tolist()):
        raise BadPlan("copies: a destination page is also a source page")
    return copies


def _decode_samplers(plan: worker_pb2.StepPlan, limits: StepLimits) -> tuple[SamplerParams, ...]:
    if not plan.samplers:
        return ()
    samplers = tuple(
        decode_sampler(message, slots=limits.sampler_slots, vocab_size=limits.vocab_size)
        for message in plan.samplers
    )
    check_unique("samplers: slots", np.asarray([s.slot for s in samplers], np.int32))
    return samplers


def _decode_masks(plan: worker_pb2.StepPlan, limits: StepLimits) -> tuple[TokenMask, ...]:
    if not plan.masks:
        return ()
    masks = decode_masks(plan.masks, vocab_size=limits.vocab_size)
    check_unique("masks: slots", np.asarray([mask.slot for mask in masks], np.int32))
    return masks
