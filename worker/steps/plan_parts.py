"""Parts of a step plan as plans of their own, and their results as the result of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.token_sources import runs
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, decode_int32, encode_float32, encode_int32
from stemserve.worker.steps.layout import sub_layout
from stemserve.worker.steps.step import ITEM, Step

_Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows start .. stop - 1 of a step: whole segments, or rows of one stored segment."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reads:
    """What a part reads, as positions in the whole step's arrays."""

    gathers: _Index
    ids: _Index
    classified: _Index
    samples: _Index

    @classmethod
    def of(cls, step: Step, part: Part) -> "_Reads":
        def inside(rows: Int32) -> _Index:
            return np.flatnonzero((rows >= part.start) & (rows < part.stop))

        gathers = inside(step.gathers.rows)
        counts = np.diff(step.gathers.indptr)
        return cls(
            gathers=gathers,
            ids=runs(step.gathers.indptr[:-1][gathers], counts[gathers]).astype(np.intp),
            classified=inside(step.classify_rows),
            samples=inside(step.samples.rows),
        )


def halves(step: Step, part: Part) -> tuple[Part, Part] | None:
    """Two parts, the first of which reads nothing that the second computes; None: it is too small.

    A segment comes behind those that compute what it reads.
    """
    starts = step.layout.segment_indptr
    middle = part.start + part.rows // 2
    inner = starts[(starts > part.start) & (starts < part.stop)]
    if len(inner):
        middle = int(inner[np.abs(inner - middle).argmin()])
    else:
        segment = int(np.searchsorted(starts, part.start, side="right")) - 1
        if step.segment_kind[segment] == ITEM or part.rows < 2:
            return None
    return Part(start=part.start, stop=middle), Part(start=middle, stop=part.stop)


def part_plan(plan: worker_pb2.StepPlan, step: Step, part: Part) -> worker_pb2.StepPlan:
    """The part as a plan. Each has the copies of the whole: nothing writes what is copied."""
    reads, rows = _Reads.of(step, part), slice(part.start, part.stop)
    slots = step.samples.slots[reads.samples]
    foreign = set(step.samples.slots.tolist()) - set(slots.tolist())
    by_sub_step = step.kv_slots.reshape(step.repeat, step.num_rows)
    cut = worker_pb2.StepPlan(
        step_id=step.step_id,
        token_ids=encode_int32(step.token_ids[rows]),
        positions=encode_int32(step.positions[rows]),
        kv_slots=encode_int32(by_sub_step[:, rows]),
        copies=encode_int32(step.copies),
        gather_rows=encode_int32(step.gathers.rows[reads.gathers] - part.start),
        gather_indptr=encode_int32(_indptr(np.diff(step.gathers.indptr)[reads.gathers])),
        gather_ids=encode_int32(step.gathers.ids[reads.ids]),
        classify_rows=encode_int32(step.classify_rows[reads.classified] - part.start),
        sample_rows=encode_int32(step.samples.rows[reads.samples] - part.start),
        sample_slots=encode_int32(slots),
        sample_index=encode_int32(step.samples.index[reads.samples]),
        samplers=[sampler for sampler in plan.samplers if sampler.slot not in foreign],
        masks=[mask for mask in plan.masks if mask.slot not in foreign],
        repeat=plan.repeat,
        row_steps=encode_int32(step.row_steps[rows]) if len(step.row_steps) else b"",
    )
    _set_segments(cut, step, part)
    return cut


def _set_segments(cut: worker_pb2.StepPlan, step: Step, part: Part) -> None:
    starts = step.layout.segment_indptr
    first = int(np.searchsorted(starts, part.start, side="right")) - 1
    end = int(np.searchsorted(starts, part.stop))
    segments: _Index = np.arange(first, end, dtype=np.intp)
    if starts[first] == part.start and starts[end] == part.stop:
        layout = sub_layout(step.layout, segments)
    else:
        layout = _cut_segment(step.layout, first, part)
    cut.segment_indptr = encode_int32(layout.segment_indptr)
    cut.segment_kind = encode_int32(step.segment_kind[segments])
    cut.segment_kernel = encode_int32(step.segment_kernel[segments])
    cut.segment_node = encode_int32(layout.segment_node)
    cut.node_parent = encode_int32(layout.node_parent)
    cut.node_page_indptr = encode_int32(layout.node_page_indptr)
    cut.node_pages = encode_int32(layout.node_pages)
    cut.node_tokens = encode_int32(layout.node_tokens)


def _cut_segment(layout: AttentionLayout, segment: int, part: Part) -> AttentionLayout:
    """Some rows of a stored segment, whose chain ends with the last of them."""
    behind = int(layout.segment_indptr[segment + 1]) - part.stop
    tokens = int(layout.chain_tokens[segment]) - behind
    pages = layout.chain_pages(int(layout.segment_node[segment]))
    pages = pages[: -(-tokens // layout.page_size)]
    return AttentionLayout(
        page_size=layout.page_size,
        node_parent=int32([-1]),
        node_page_indptr=int32([0, len(pages)]),
        node_pages=pages,
        node_tokens=int32([tokens]),
        segment_indptr=int32([0, part.rows]),
        segment_node=int32([0]),
        segment_is_item=np.array([False]),
    )


class WholeResult:
    """Takes the results of a step's parts, in any order."""

    def __init__(self, step: Step, num_classes: int) -> None:
        samples = step.repeat * len(step.samples.rows)
        self._step = step
        self._logprobs = np.full(len(step.gathers.ids), np.nan, np.float32)
        self._argmax = np.full(len(step.gathers.rows), -1, np.int32)
        self._scores = np.full((len(step.classify_rows), num_classes), np.nan, np.float32)
        self._tokens = np.zeros(samples, np.int32)
        self._token_logprobs = np.full(samples, np.nan, np.float32)
        self._top_ids = [np.empty(0, np.int32)] * samples
        self._top_logprobs = [np.empty(0, np.float32)] * samples
        self._failed: list[Int32] = []
        self._starved: list[Int32] = []
        self._groups: list[worker_pb2.GroupReport] = []
        self._fallbacks: list[worker_pb2.Fallback] = []

    def add(self, part: Part, result: worker_pb2.StepResult) -> None:
        step, reads = self._step, _Reads.of(self._step, part)
        self._logprobs[reads.ids] = decode_float32("", result.gather_logprobs)
        self._argmax[reads.gathers] = decode_int32("", result.gather_argmax)
        if len(reads.classified):
            scores = decode_float32("", result.class_scores)
            self._scores[reads.classified] = scores.reshape(len(reads.classified), -1)
        self._add_samples(reads.samples, result)
        sub_step, row = np.divmod(decode_int32("", result.failed_rows), part.rows)
        self._failed.append(int32(sub_step * step.num_rows + part.start + row))
        self._groups += result.groups
        self._fallbacks += result.fallbacks

    def starve(self, part: Part) -> None:
        """There was no memory for the part; what it reads is void."""
        self._starved.append(np.arange(part.start, part.stop, dtype=np.int32))

    def result(self, shortages: int, seconds: float) -> worker_pb2.StepResult:
        """`shortages`: how often memory ran out."""
        result = worker_pb2.StepResult(
            step_id=self._step.step_id,
            sampled_tokens=encode_int32(self._tokens),
            sampled_logprobs=encode_float32(self._token_logprobs),
            gather_logprobs=encode_float32(self._logprobs),
            gather_argmax=encode_int32(self._argmax),
            class_scores=encode_float32(self._scores),
            failed_rows=encode_int32(np.sort(_joined(self._failed))),
            starved_rows=encode_int32(np.sort(_joined(self._starved))),
            memory_shortages=shortages,
            groups=self._groups,
            step_seconds=seconds,
            fallbacks=self._fallbacks,
            trees=self._step.num_trees,
        )
        counts = np.array([len(ids) for ids in self._top_ids], np.int32)
        if counts.any():
            result.top_indptr = encode_int32(_indptr(counts))
            result.top_ids = encode_int32(np.concatenate(self._top_ids))
            result.top_logprobs = encode_float32(np.concatenate(self._top_logprobs))
        return result

    def _add_samples(self, samples: _Index, result: worker_pb2.StepResult) -> None:
        every = np.arange(self._step.repeat)[:, None] * len(self._step.samples.rows)
        at = (every + samples).ravel()
        self._tokens[at] = decode_int32("", result.sampled_tokens)
        self._token_logprobs[at] = decode_float32("", result.sampled_logprobs)
        if not result.top_indptr:
            return
        indptr = decode_int32("", result.top_indptr).tolist()
        ids, logprobs = decode_int32("", result.top_ids), decode_float32("", result.top_logprobs)
        for sample, begin, end in zip(at.tolist(), indptr[:-1], indptr[1:], strict=True):
            self._top_ids[sample] = ids[begin:end]
            self._top_logprobs[sample] = logprobs[begin:end]


def _indptr(counts: NDArray[np.integer]) -> Int32:
    return int32(np.concatenate([[0], np.cumsum(counts)]))


def _joined(arrays: Sequence[Int32]) -> Int32:
    return np.concatenate([np.empty(0, np.int32), *arrays])
