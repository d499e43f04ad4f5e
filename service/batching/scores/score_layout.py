"""Lay out a Score job's rows, context by context, so that any run of units is a slice."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.service.batching.steps.plan_arrays import indptr_of
from stemserve.service.errors import EngineFault, InvalidRequest
from stemserve.service.request import Int32, ScoreJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Gathers in the order in which the rows run."""

    row: Int32  # [gathers] ascending: job row, or context for reads at a context's last token
    index: Int32  # [gathers] in the job
    unit: Int32  # [gathers] in the job
    indptr: Int32  # [gathers + 1] into ids
    ids: Int32
    id_index: Int32  # [ids] in the job
    as_sent: bool = False  # `index`, `unit` and `id_index` count from 0, one by one

    def within(self, first_row: int, end_row: int) -> tuple[int, int]:
        """The gathers at rows first_row .. end_row - 1."""
        if not len(self.row):
            return 0, 0
        # Of the array's own type: another would have it converted.
        first, end = self.row.searchsorted(np.array([first_row, end_row], np.int32)).tolist()
        return first, end


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLayout:
    """Units sorted by context, each cut behind its last row that is read."""

    row_token: Int32  # [rows]
    row_offset: Int32  # [rows] inside the unit
    unit_rows: Int32  # [units]
    most_unit_rows: int  # of one unit
    row_indptr: Int32  # [units + 1]
    unit_index: Int32  # [units] in the job
    context_indptr: Int32  # [contexts + 1] units of each context
    context_lengths: Int32  # [contexts]
    contexts: Int32  # those to run: all if there are no units
    item_reads: Reads
    context_reads: Reads
    prompt_tokens: int  # that one-by-one requests would have sent

    def reads_context(self, context: int) -> bool:
        """Whether the logits of the context's last token are needed."""
        first, end = self.context_reads.within(context, context + 1)
        return first < end


NO_READS = Reads(
    row=np.zeros(0, np.int32),
    index=np.zeros(0, np.int32),
    unit=np.zeros(0, np.int32),
    indptr=np.zeros(1, np.int32),
    ids=np.zeros(0, np.int32),
    id_index=np.zeros(0, np.int32),
)


def lay_out(job: ScoreJob) -> ScoreLayout:
    """Raises RequestError for a job that reads what is not there."""
    unit_lengths = job.unit_indptr[1:] - job.unit_indptr[:-1]
    if _is_plain(job, unit_lengths):
        return _as_sent(job, unit_lengths)
    lengths = np.array([len(context) for context in job.contexts], np.int32)
    at_context = job.gather_offset < 0
    _check(job, lengths, unit_lengths, at_context)
    order, place = _by_context(job.unit_context)
    unit_rows = _needed_rows(job, unit_lengths)[order]
    row_indptr = indptr_of(unit_rows)
    row_offset = np.arange(row_indptr[-1], dtype=np.int32) - row_indptr[:-1].repeat(unit_rows)
    gather_row = row_indptr[place[job.gather_unit]] + job.gather_offset
    counts = np.bincount(job.unit_context, minlength=len(lengths)).astype(np.int32)
    used = counts.nonzero()[0] if len(order) else np.arange(len(lengths))
    each = counts if len(order) else np.ones(len(lengths), np.int32)
    context_tokens = int(np.dot(each.astype(np.int64), lengths))
    return ScoreLayout(
        row_token=job.unit_tokens[job.unit_indptr[:-1][order].repeat(unit_rows) + row_offset],
        row_offset=row_offset,
        unit_rows=unit_rows,
        most_unit_rows=int(unit_rows.max(initial=0)),
        row_indptr=row_indptr,
        unit_index=order,
        context_indptr=indptr_of(counts),
        context_lengths=lengths,
        contexts=used.astype(np.int32),
        item_reads=_reads(job, gather_row, ~at_context),
        context_reads=_reads(job, job.unit_context[job.gather_unit], at_context),
        prompt_tokens=context_tokens + len(job.unit_tokens),
    )


def _is_plain(job: ScoreJob, unit_lengths: Int32) -> bool:
    """Each unit continues one context and is read once, after its last token."""
    units = len(unit_lengths)
    return (
        len(job.contexts) == 1
        and len(job.gather_unit) == units > 0
        and not job.classify
        and not job.unit_indptr[0]
        # Bytes are compared without a pass for each of the operations.
        and job.gather_unit.tobytes() == np.arange(units, dtype=np.int32).tobytes()
        and job.gather_offset.tobytes() == (unit_lengths - np.int32(1)).tobytes()
        and bool(unit_lengths.all())
    )


def _as_sent(job: ScoreJob, unit_lengths: Int32) -> ScoreLayout:
    """Of a plain job: all is in order."""
    units, length, starts = len(unit_lengths), len(job.contexts[0]), job.unit_indptr[:-1]
    reads = Reads(
        row=job.unit_indptr[1:] - np.int32(1),
        index=job.gather_unit,
        unit=job.gather_unit,
        indptr=job.gather_indptr,
        ids=job.gather_ids,
        id_index=np.arange(len(job.gather_ids), dtype=np.int32),
        as_sent=True,
    )
    return ScoreLayout(
        row_token=job.unit_tokens,
        row_offset=np.arange(len(job.unit_tokens), dtype=np.int32) - starts.repeat(unit_lengths),
        unit_rows=unit_lengths,
        most_unit_rows=int(unit_lengths.max()),
        row_indptr=job.unit_indptr,
        unit_index=job.gather_unit,
        context_indptr=np.array((0, units), np.int32),
        context_lengths=np.array((length,), np.int32),
        contexts=np.zeros(1, np.int32),
        item_reads=reads,
        context_reads=NO_READS,
        prompt_tokens=units * length + len(job.unit_tokens),
    )


def _by_context(unit_context: Int32) -> tuple[Int32, Int32]:
    """The units in the order of their contexts, and where each of them is there."""
    every = np.arange(len(unit_context), dtype=np.int32)
    if not (unit_context[1:] < unit_context[:-1]).any():
        return every, every
    order = np.argsort(unit_context, kind="stable").astype(np.int32)
    place = np.empty_like(order)
    place[order] = every
    return order, place


def _check(
    job: ScoreJob, context_lengths: Int32, unit_lengths: Int32, at_context: NDArray[np.bool_]
) -> None:
    if (job.gather_offset >= unit_lengths[job.gather_unit]).any():
        raise EngineFault("a score job reads behind the end of one of its units")
    if job.classify and not unit_lengths.all():
        raise EngineFault("a score job classifies an empty unit")
    units_before = job.gather_unit[at_context]
    if not context_lengths[job.unit_context[units_before]].all():
        raise InvalidRequest("items", "nothing comes before the first token of an empty context")


def _needed_rows(job: ScoreJob, unit_lengths: Int32) -> Int32:  # [units]
    """Rows of each unit: no later token is read."""
    if job.classify:
        return unit_lengths
    rows = np.zeros(len(unit_lengths), np.int32)
    np.maximum.at(rows, job.gather_unit, job.gather_offset + 1)
    return rows


def _reads(job: ScoreJob, row: Int32, chosen: NDArray[np.bool_]) -> Reads:
    """The chosen gathers, sorted by their row."""
    index = chosen.nonzero()[0].astype(np.int32)
    if not len(index):
        return NO_READS
    row = row[index]
    if (row[1:] < row[:-1]).any():
        order = np.argsort(row, kind="stable")
        index, row = index[order], row[order]
    elif len(index) == len(chosen):
        return Reads(
            row=row,
            index=index,
            unit=job.gather_unit,
            indptr=job.gather_indptr,
            ids=job.gather_ids,
            id_index=np.arange(len(job.gather_ids), dtype=np.int32),
        )
    starts = job.gather_indptr[index]
    lengths = job.gather_indptr[index + 1] - starts
    indptr = indptr_of(lengths)
    id_index = np.arange(indptr[-1], dtype=np.int32) + (starts - indptr[:-1]).repeat(lengths)
    return Reads(
        row=row,
        index=index,
        unit=job.gather_unit[index],
        indptr=indptr,
        ids=job.gather_ids[id_index],
        id_index=id_index,
    )
