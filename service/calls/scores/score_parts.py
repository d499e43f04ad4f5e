"""Answer a Score call in parts: each item once, as soon as it is scored."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.scores.reading import Values
from stemserve.service.calls.scores.score_answer import (
    NOT_FINITE,
    TOO_LATE,
    error_messages,
    has_scores,
    rows_message,
    usage_message,
)
from stemserve.service.calls.scores.scoring import ScorePlan
from stemserve.service.packed_tokens import offsets, slice_indices
from stemserve.service.request import Float32, Int32, ScorePart, ScoreResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RowValues:
    """What was read of a few rows."""

    gather_logprobs: Float32
    gather_argmax: Int32
    class_scores: Float32


class ScoreParts:
    """What of one call is told, and the messages of what is not, of at most some items each."""

    def __init__(self, plan: ScorePlan, most_items: int) -> None:
        self._plan = plan
        self._most_items = most_items
        rows = len(plan.rows.items)
        self._units_left = np.bincount(plan.reads.unit_row, minlength=rows)
        self._failed = np.zeros(rows, np.bool_)
        self._late = np.zeros(rows, np.bool_)
        self._untold = np.ones(len(plan.call.items), np.bool_)
        gather_row = plan.reads.unit_row[plan.reads.gather_unit]
        # Gathers are sorted by unit and units by row.
        self._gather_indptr = offsets(np.bincount(gather_row, minlength=rows).astype(np.int32))

    def add(self, part: ScorePart) -> Iterator[inference_pb2.ScoreResponse]:
        """Messages of the items whose last unit this was."""
        unit_row = self._plan.reads.unit_row
        rows = unit_row[part.units]
        np.subtract.at(self._units_left, rows, 1)
        self._failed[unit_row[part.failed_units]] = True
        rows = np.unique(rows)
        yield from self._messages(part, self._plan.rows.items[rows[self._units_left[rows] == 0]])

    def finish(self, result: ScoreResult) -> Iterator[inference_pb2.ScoreResponse]:
        """Messages of all items that are left, at least one; the last has the usage."""
        unit_row = self._plan.reads.unit_row
        self._failed[unit_row[result.failed_units]] = True
        self._late[unit_row[result.unread_units]] = True
        messages = self._messages(result, np.flatnonzero(self._untold).astype(np.int32))
        last = next(messages, None) or self._message(result, np.zeros(0, np.int32))
        for message in messages:
            yield last
            last = message
        last.usage.CopyFrom(usage_message(result.usage))
        last.partial = bool(len(result.unread_units))
        yield last

    def _messages(self, values: Values, items: Int32) -> Iterator[inference_pb2.ScoreResponse]:
        self._untold[items] = False
        for start in range(0, len(items), self._most_items):
            yield self._message(values, items[start : start + self._most_items])

    def _message(self, values: Values, items: Int32) -> inference_pb2.ScoreResponse:
        plan = self._plan
        rows, has_row = self._rows(items)
        readout = plan.mode.take(rows).read(self._values(values, rows))
        finite = has_scores(readout) & ~self._failed[rows] & ~self._late[rows]
        order = np.full(len(items), -1, np.int32)
        order[np.flatnonzero(has_row)[finite]] = np.flatnonzero(finite)
        message = rows_message(plan.call.request, readout, order)
        message.item_index.extend(items.tolist())
        problems = {item: plan.call.problems[item] for item in items[~has_row].tolist()}
        problems |= dict.fromkeys(plan.rows.items[rows[~finite]].tolist(), NOT_FINITE)
        late = plan.rows.items[rows[self._late[rows]]]
        problems |= dict.fromkeys(late.tolist(), TOO_LATE)
        message.errors.extend(error_messages(problems))
        return message

    def _rows(self, items: Int32) -> tuple[Int32, NDArray[np.bool_]]:
        """Of those items that have one, and which do."""
        known = self._plan.rows.items
        rows = np.searchsorted(known, items).astype(np.int32)
        has_row = rows < len(known)
        has_row[has_row] = known[rows[has_row]] == items[has_row]
        return rows[has_row], has_row

    def _values(self, values: Values, rows: Int32) -> _RowValues:
        reads = self._plan.reads
        gathers = _inside(self._gather_indptr, rows)
        ids = _inside(reads.gather_indptr, gathers)
        return _RowValues(
            gather_logprobs=values.gather_logprobs[ids],
            gather_argmax=values.gather_argmax[gathers],
            class_scores=values.class_scores[rows] if reads.classify else values.class_scores,
        )


def _inside(indptr: Int32, slices: Int32) -> Int32:
    """All places of these slices."""
    return slice_indices(indptr[slices], indptr[slices + 1] - indptr[slices])
