"""One context of a Score job, from its first page to its last item."""

from dataclasses import dataclass, field

import numpy as np

from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.pages.sequence import Branch, Chain
from stemserve.service.batching.scores.score_layout import Reads, ScoreLayout
from stemserve.service.batching.steps.prefix_forest import StoredChain
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPiece:
    """Gathers of a job that one step answers."""

    reads: Reads
    first: int
    end: int
    gather_at: int  # where they begin in the step's gathers
    id_at: int
    node: PageNode | None  # page of the context's last token, where that is read


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPiece:
    units: Int32  # of the job
    class_at: int


@dataclass(slots=True)
class StepPieces:
    """What one step does for a Score job."""

    runs: list["ContextRun"] = field(default_factory=list["ContextRun"])
    reads: list[ReadPiece] = field(default_factory=list[ReadPiece])
    classes: list[ClassPiece] = field(default_factory=list[ClassPiece])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    layout: ScoreLayout
    classify: bool
    kernel: int
    max_item_rows: int  # a longer unit runs in pages of its own, in chunks


class ContextRun:
    def __init__(
        self, context: int, options: RunOptions, chain: Chain | None, scratch: Branch | None
    ) -> None:
        self.chain = chain  # None: an empty context
        self.scratch = scratch  # for units that are too long for a step
        self.computed_rows = 0  # of the context
        self.item_rows = 0
        self.pending_steps = 0
        self._context = context
        self._options = options
        self._layout = options.layout
        self._reads_context = options.layout.reads_context(context)
        self._unit, self._end_unit = options.layout.context_indptr[context : context + 2].tolist()
        self._long_rows = 0  # rows of the current unit that are planned
        self._long_step = -1  # last step with rows of a long unit
        self._has_copied_tail = False

    @property
    def is_planned(self) -> bool:
        """Nothing is left to plan."""
        if self._reads_context or self._rows_left():
            return False
        return self.chain is None or self.chain.planned_tokens() == self.chain.length

    def plan(self, step: StepBuilder, pieces: StepPieces) -> None:
        room = step.room
        if self._plan_context(step, pieces):
            self._plan_units(step, pieces)
        if step.room < room:
            self.pending_steps += 1
            pieces.runs.append(self)

    def _plan_context(self, step: StepBuilder, pieces: StepPieces) -> bool:
        """Whether the context is computed once this step has run, and read where it must be."""
        chain = self.chain
        if chain is None:
            return True
        chunk = step.prefill(
            chain, self._options.kernel, reads_from=chain.length - self._reads_context
        )
        self.computed_rows += chunk.stop - chunk.start
        is_computed = chunk.stop == chain.length
        if is_computed and self._reads_context:
            self._read_context(step, pieces, chunk.last_row)
        return is_computed

    def _read_context(self, step: StepBuilder, pieces: StepPieces, row: int) -> None:
        reads = self._layout.context_reads
        first, end = reads.within(self._context, self._context + 1)
        self._add_reads(step, pieces, reads, (first, end), np.full(end - first, row, np.int32))
        self._reads_context = False

    def _plan_units(self, step: StepBuilder, pieces: StepPieces) -> None:
        while self._rows_left() and step.room:
            if self._layout.unit_rows[self._unit] > self._options.max_item_rows:
                if not self._plan_long_unit(step, pieces):
                    return
            elif not self._plan_items(step, pieces):
                return

    def _rows_left(self) -> int:
        indptr = self._layout.row_indptr
        return int(indptr[self._end_unit] - indptr[self._unit]) - self._long_rows

    def _plan_items(self, step: StepBuilder, pieces: StepPieces) -> bool:
        """Pack as many whole units as fit. False: not even the next one does."""
        layout, first = self._layout, self._unit
        # Of the array's own type: another would have it converted.
        row_limit = np.int32(layout.row_indptr[first] + step.room)
        fitting = int(layout.row_indptr.searchsorted(row_limit, side="right")) - 1
        end = min(fitting, self._end_unit)
        if layout.most_unit_rows > self._options.max_item_rows:
            is_long = layout.unit_rows[first:end] > self._options.max_item_rows
            end = first + int(is_long.argmax()) if is_long.any() else end
        if end == first:
            if layout.unit_rows[first] > step.room_for_one:
                return False
            end = first + 1
        self._unit = end
        first_row, end_row = int(layout.row_indptr[first]), int(layout.row_indptr[end])
        if first_row == end_row:
            return True
        lengths = layout.unit_rows[first:end]
        chain = self.chain
        stored = None if chain is None else StoredChain(chain.table, chain.length)
        row = step.rows.add_items(
            layout.row_token[first_row:end_row],
            layout.row_offset[first_row:end_row],
            lengths if lengths.all() else lengths[lengths > 0],
            stored,
            self._options.kernel,
        )
        self._add_unit_reads(step, pieces, (first_row, end_row), row)
        if self._options.classify:
            last_rows = layout.row_indptr[first + 1 : end + 1] - 1 - first_row + row
            self._classify(step, pieces, layout.unit_index[first:end], last_rows)
        return True

    def _plan_long_unit(self, step: StepBuilder, pieces: StepPieces) -> bool:
        """Run the next chunk of a unit in the scratch pages. False: on with it in a later step."""
        scratch = self.scratch
        if scratch is None or self._long_step == step.step_id or not self._copy_tail(step):
            return False
        layout, unit = self._layout, self._unit
        length = 0 if self.chain is None else self.chain.length
        start = self._long_rows
        stop = min(int(layout.unit_rows[unit]), start + step.room)
        first_row = int(layout.row_indptr[unit])
        row = step.rows.add_prefill(
            layout.row_token[first_row + start : first_row + stop],
            scratch.slots(length + start, length + stop),
            StoredChain(scratch.table, length + stop),
            self._options.kernel,
        )
        self._long_step = step.step_id
        self._long_rows = stop
        self._add_unit_reads(step, pieces, (first_row + start, first_row + stop), row)
        if stop < layout.unit_rows[unit]:
            return False
        if self._options.classify:
            last = np.array([row + stop - start - 1], np.int32)
            self._classify(step, pieces, layout.unit_index[unit : unit + 1], last)
        self._unit, self._long_rows = unit + 1, 0
        return True

    def _copy_tail(self, step: StepBuilder) -> bool:
        """Whether the scratch pages begin with the context's partial tail."""
        scratch = self.scratch
        if scratch is None or scratch.tail is None or self._has_copied_tail:
            return True
        if step.planned_before(scratch.tail) < scratch.tail_tokens:
            return False
        step.copy_tail(scratch)
        self._has_copied_tail = True
        return True

    def _add_unit_reads(
        self, step: StepBuilder, pieces: StepPieces, job_rows: tuple[int, int], row: int
    ) -> None:
        first_row, end_row = job_rows
        self.item_rows += end_row - first_row
        reads = self._layout.item_reads
        first, end = reads.within(first_row, end_row)
        self._add_reads(step, pieces, reads, (first, end), reads.row[first:end] - first_row + row)

    def _add_reads(
        self,
        step: StepBuilder,
        pieces: StepPieces,
        reads: Reads,
        gathers: tuple[int, int],
        rows: Int32,
    ) -> None:
        first, end = gathers
        if first == end:
            return
        piece = ReadPiece(
            reads=reads,
            first=first,
            end=end,
            gather_at=step.readouts.num_gathers,
            id_at=step.readouts.num_gather_ids,
            node=self.chain.nodes[-1]
            if reads is self._layout.context_reads and self.chain
            else None,
        )
        indptr = reads.indptr[first : end + 1]
        lengths = indptr[1:] - indptr[:-1]
        step.readouts.add_gathers(rows, lengths, reads.ids[indptr[0] : indptr[-1]])
        pieces.reads.append(piece)

    def _classify(self, step: StepBuilder, pieces: StepPieces, units: Int32, rows: Int32) -> None:
        pieces.classes.append(ClassPiece(units=units, class_at=step.readouts.num_classified))
        step.readouts.add_classified(rows)
