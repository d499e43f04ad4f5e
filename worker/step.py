"""One step of the model: a StepPlan decoded to host arrays and checked."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_int32
from stemserve.worker.burst import (
    check_burst_rows,
    decode_row_steps,
    layout_ahead,
    longest_layout,
    tokens_ahead,
)
from stemserve.worker.sampler_params import SamplerParams, TokenMask, decode_mask, decode_sampler
from stemserve.worker.step_checks import (
    StepLimits,
    check_forest,
    check_indptr,
    check_layout_rows,
    check_range,
    check_segments,
    check_unique,
)

PREFILL = worker_pb2.SEGMENT_KIND_PREFILL
DECODE = worker_pb2.SEGMENT_KIND_DECODE
ITEM = worker_pb2.SEGMENT_KIND_ITEM

NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """Token ids whose log-probabilities are read at some rows."""

    rows: Int32  # [gathers]
    indptr: Int32  # [gathers + 1]
    ids: Int32  # [indptr[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Tokens to draw: from which row, into which slot, and how many the slot drew before."""

    rows: Int32  # [samples]
    slots: Int32  # [samples]
    index: Int32  # [samples]

    def of(self, some: NDArray[np.integer]) -> "Samples":
        return Samples(rows=self.rows[some], slots=self.slots[some], index=self.index[some])


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
        return replace(step, token_ids=-1 - samples.slots, copies=NONE.reshape(0, 3), samplers=())


def decode_step(plan: worker_pb2.StepPlan, limits: StepLimits) -> Step:
    """Raises BadPlan with the array that is wrong and what is wrong about it."""
    repeat = max(1, plan.repeat)
    if repeat > limits.max_burst_steps:
        raise BadPlan(f"repeat is {repeat}; this worker runs at most {limits.max_burst_steps}")
    token_ids = decode_int32("token_ids", plan.token_ids)
    positions = decode_int32("positions", plan.positions)
    kv_slots = decode_int32("kv_slots", plan.kv_slots)
    rows = len(token_ids)
    row_steps = decode_row_steps(plan.row_steps, repeat=repeat, rows=rows)
    _check_rows(token_ids, positions, kv_slots, limits, repeat)
    kind = decode_int32("segment_kind", plan.segment_kind)
    kernel = decode_int32("segment_kernel", plan.segment_kernel)
    layout = _decode_layout(plan, kind, limits, row_steps)
    _check_segment_rows(layout, rows)
    check_segments(layout, kind, kernel)
    step = Step(
        step_id=plan.step_id,
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        layout=layout,
        segment_kind=kind,
        segment_kernel=kernel,
        copies=_decode_copies(plan.copies, limits),
        gathers=_decode_gathers(plan, limits, rows),
        classify_rows=_decode_classify_rows(plan.classify_rows, limits, rows),
        samples=_decode_samples(plan, limits, rows),
        samplers=_decode_samplers(plan, limits),
        masks=_decode_masks(plan, limits),
        repeat=repeat,
        row_steps=row_steps,
    )
    _check_places(step, limits)
    return step


def _check_rows(
    token_ids: Int32, positions: Int32, kv_slots: Int32, limits: StepLimits, repeat: int
) -> None:
    rows = len(token_ids)
    if not 1 <= rows <= limits.max_step_tokens:
        raise BadPlan(f"the step has {rows} rows; it must have 1..{limits.max_step_tokens}")
    if len(positions) != rows or len(kv_slots) != repeat * rows:
        raise BadPlan(
            f"{rows} token_ids, {len(positions)} positions and {len(kv_slots)} kv_slots "
            f"of {repeat} sub-steps differ"
        )
    check_range("token_ids", token_ids, -limits.sampler_slots, limits.vocab_size)
    check_range("positions", positions, 0, limits.context_tokens)
    check_range("kv_slots", kv_slots, -1, limits.kv_pages * limits.page_size)
    check_unique("kv_slots", kv_slots[kv_slots >= 0])


def _check_segment_rows(layout: AttentionLayout, rows: int) -> None:
    check_indptr("segment_indptr", layout.segment_indptr, layout.num_segments, rows)
    if (layout.segment_rows < 1).any():
        raise BadPlan("segment_indptr has a segment without rows")


def _check_places(step: Step, limits: StepLimits) -> None:
    """Where rows are in their chains; what a burst may read; whose masks there are."""
    if step.repeat == 1:
        masked = np.asarray([mask.slot for mask in step.masks], np.int64)
        if not np.isin(masked, step.samples.slots).all():
            raise BadPlan("masks: a slot is not sampled in this step")
        check_layout_rows(step.layout, step.positions, step.kv_slots)
        return
    check_burst_rows(step.layout, step.positions, step.kv_slots, step.row_steps)
    check_range("positions", step.positions + step.row_steps - 1, 0, limits.context_tokens)
    if len(step.gathers.rows) or len(step.classify_rows):
        raise BadPlan("gather_rows and classify_rows: a burst reads nothing but its samples")
    if step.masks:
        raise BadPlan("masks: a burst has none")
    if not np.array_equal(step.samples.rows, np.arange(step.num_rows)):
        raise BadPlan("sample_rows: a burst samples every row once, in order")


def _decode_layout(
    plan: worker_pb2.StepPlan, kind: Int32, limits: StepLimits, row_steps: Int32
) -> AttentionLayout:
    layout = AttentionLayout(
        page_size=limits.page_size,
        node_parent=decode_int32("node_parent", plan.node_parent),
        node_page_indptr=decode_int32("node_page_indptr", plan.node_page_indptr),
        node_pages=decode_int32("node_pages", plan.node_pages),
        node_tokens=decode_int32("node_tokens", plan.node_tokens),
        segment_indptr=decode_int32("segment_indptr", plan.segment_indptr),
        segment_node=decode_int32("segment_node", plan.segment_node),
        segment_is_item=kind == ITEM,
    )
    grown = longest_layout(layout, kind, row_steps) if len(row_steps) else layout
    check_forest(grown, limits.kv_pages)
    return layout


def _decode_copies(blob: bytes, limits: StepLimits) -> Int32:
    flat = decode_int32("copies", blob)
    if len(flat) % 3:
        raise BadPlan(f"copies has {len(flat)} numbers, which is not a multiple of 3")
    copies = flat.reshape(-1, 3)
    if not len(copies):
        return copies
    check_range("copies: pages", copies[:, :2], 0, limits.kv_pages)
    check_range("copies: tokens", copies[:, 2], 1, limits.page_size + 1)
    check_unique("copies: destination pages", copies[:, 1])
    # Copies run as one gather and one scatter: a page cannot be both ends.
    if np.isin(copies[:, 1], copies[:, 0]).any():
        raise BadPlan("copies: a destination page is also a source page")
    return copies


def _decode_gathers(plan: worker_pb2.StepPlan, limits: StepLimits, rows: int) -> Gathers:
    gathers = Gathers(
        rows=decode_int32("gather_rows", plan.gather_rows),
        indptr=_decode_indptr("gather_indptr", plan.gather_indptr),
        ids=decode_int32("gather_ids", plan.gather_ids),
    )
    if len(gathers.rows) and not limits.has_lm_head:
        raise BadPlan("gather_rows: the model has no LM head")
    check_range("gather_rows", gathers.rows, 0, rows)
    check_indptr("gather_indptr", gathers.indptr, len(gathers.rows), len(gathers.ids))
    check_range("gather_ids", gathers.ids, 0, limits.vocab_size)
    return gathers


def _decode_indptr(name: str, blob: bytes) -> Int32:
    # No slices at all may be written as an empty blob.
    return decode_int32(name, blob) if blob else np.zeros(1, np.int32)


def _decode_classify_rows(blob: bytes, limits: StepLimits, rows: int) -> Int32:
    classify_rows = decode_int32("classify_rows", blob)
    if len(classify_rows) and not limits.classes:
        raise BadPlan("classify_rows: the model has no classification head")
    check_range("classify_rows", classify_rows, 0, rows)
    return classify_rows


def _decode_samples(plan: worker_pb2.StepPlan, limits: StepLimits, rows: int) -> Samples:
    samples = Samples(
        rows=decode_int32("sample_rows", plan.sample_rows),
        slots=decode_int32("sample_slots", plan.sample_slots),
        index=decode_int32("sample_index", plan.sample_index),
    )
    count = len(samples.rows)
    if len(samples.slots) != count or len(samples.index) != count:
        raise BadPlan(
            f"{count} sample_rows, {len(samples.slots)} sample_slots "
            f"and {len(samples.index)} sample_index differ"
        )
    if count and not limits.has_lm_head:
        raise BadPlan("sample_rows: the model has no LM head")
    check_range("sample_rows", samples.rows, 0, rows)
    check_range("sample_slots", samples.slots, 0, limits.sampler_slots)
    check_unique("sample_slots", samples.slots)
    check_range("sample_index", samples.index, 0, np.iinfo(np.int32).max)
    return samples


def _decode_samplers(plan: worker_pb2.StepPlan, limits: StepLimits) -> tuple[SamplerParams, ...]:
    samplers = tuple(
        decode_sampler(message, slots=limits.sampler_slots, vocab_size=limits.vocab_size)
        for message in plan.samplers
    )
    check_unique("samplers: slots", np.asarray([s.slot for s in samplers], np.int32))
    return samplers


def _decode_masks(plan: worker_pb2.StepPlan, limits: StepLimits) -> tuple[TokenMask, ...]:
    masks = tuple(decode_mask(message, vocab_size=limits.vocab_size) for message in plan.masks)
    check_unique("masks: slots", np.asarray([mask.slot for mask in masks], np.int32))
    return masks
