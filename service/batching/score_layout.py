"""Lay out a Score job's rows, context by context, so that any run of units is a slice."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.service.batching.plan_arrays import indptr_of
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

    def within(self, first_row: int, end_row: int) -> tuple[int, int]:
        """The gathers at rows first_row .. end_row - 1."""
        first, end = np.searchsorted(self.row, [first_row, end_row]).tolist()
        return first, end


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLayout:
    """Units sorted by context, each cut behind its last row that is read."""

    row_token: Int32  # [rows]
    row_offset: Int32  # [rows] inside the unit
    unit_rows: Int32  # [units]
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


def lay_out(job: ScoreJob) -> ScoreLayout:
    """Raises RequestError for a job that reads what is not there."""
    lengths = np.array([len(context) for context in job.contexts], np.int32)
    _check(job, lengths)
    order = np.argsort(job.unit_context, kind="stable").astype(np.int32)
    unit_rows = _needed_rows(job)[order]
    row_indptr = indptr_of(unit_rows)
    row_offset = np.arange(row_indptr[-1], dtype=np.int32) - np.repeat(row_indptr[:-1], unit_rows)
    place = np.empty_like(order)
    place[order] = np.arange(len(order), dtype=np.int32)
    gather_row = row_indptr[place[job.gather_unit]] + job.gather_offset
    at_context = job.gather_offset < 0
    counts = np.bincount(job.unit_context, minlength=len(lengths)).astype(np.int32)
    used = np.flatnonzero(counts) if len(order) else np.arange(len(lengths))
    context_tokens = lengths[job.unit_context] if len(order) else lengths
    return ScoreLayout(
        row_token=job.unit_tokens[np.repeat(job.unit_indptr[:-1][order], unit_rows) + row_offset],
        row_offset=row_offset,
        unit_rows=unit_rows,
        row_indptr=row_indptr,
        unit_index=order,
        context_indptr=indptr_of(counts),
        context_lengths=lengths,
        contexts=used.astype(np.int32),
        item_reads=_reads(job, gather_row, ~at_context),
        context_reads=_reads(job, job.unit_context[job.gather_unit], at_context),
        prompt_tokens=int(context_tokens.sum(dtype=np.int64)) + len(job.unit_tokens),
    )


def _check(job: ScoreJob, context_lengths: Int32) -> None:
    unit_lengths = np.diff(job.unit_indptr)
    if np.any(job.gather_offset >= unit_lengths[job.gather_unit]):
        raise EngineFault("a score job reads behind the end of one of its units")
    if job.classify and not np.all(unit_lengths):
        raise EngineFault("a score job classifies an empty unit")
    units_before = job.gather_unit[job.gather_offset < 0]
    if not np.all(context_lengths[job.unit_context[units_before]]):
        raise InvalidRequest("items", "nothing comes before the first token of an empty context")


def _needed_rows(job: ScoreJob) -> Int32:  # [units]
    """Rows of each unit: no later token is read."""
    if job.classify:
        return np.diff(job.unit_indptr)
    rows = np.zeros(len(job.unit_indptr) - 1, np.int32)
    np.maximum.at(rows, job.gather_unit, job.gather_offset + 1)
    return rows


def _reads(job: ScoreJob, row: Int32, chosen: NDArray[np.bool_]) -> Reads:
    """The chosen gathers, sorted by their row."""
    index = np.flatnonzero(chosen).astype(np.int32)
    index = index[np.argsort(row[index], kind="stable")]
    lengths = np.diff(job.gather_indptr)[index]
    indptr = indptr_of(lengths)
    inside = np.arange(indptr[-1], dtype=np.int32) - np.repeat(indptr[:-1], lengths)
    id_index = np.repeat(job.gather_indptr[:-1][index], lengths) + inside
    return Reads(
        row=row[index],
        index=index,
        unit=job.gather_unit[index],
        indptr=indptr,
        ids=job.gather_ids[id_index],
        id_index=id_index,
    )
