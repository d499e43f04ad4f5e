"""How far a Score job has come: its contexts in turn, and the numbers read so far."""

import numpy as np

from stemserve.service.batching.jobs.job_progress import JobProgress, Ticket
from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.pages.sequence import Branch, pages_for
from stemserve.service.batching.scores.context_run import (
    ContextRun,
    ReadPiece,
    RunOptions,
    StepPieces,
)
from stemserve.service.batching.scores.score_layout import ScoreLayout
from stemserve.service.batching.steps.plan_arrays import NO_INT32, join_int32
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.batching.steps.step_outputs import StepOutputs
from stemserve.service.request import Event, Int32, JobUsage, ScoreJob, ScorePart, ScoreResult


def longest_paged_unit(layout: ScoreLayout, context: int, max_item_rows: int) -> int:
    """Rows of the context's longest unit, if it is too long to be packed; else 0."""
    if layout.most_unit_rows <= max_item_rows:
        return 0
    first, end = layout.context_indptr[context : context + 2].tolist()
    rows = int(layout.unit_rows[first:end].max(initial=0))
    return rows if rows > max_item_rows else 0


def context_pages(layout: ScoreLayout, max_item_rows: int, page_size: int) -> int:
    """The most pages that one context of the job needs at a time."""
    most = 0
    for context in layout.contexts.tolist():
        length = int(layout.context_lengths[context])
        pages = pages_for(length, page_size)
        rows = longest_paged_unit(layout, context, max_item_rows)
        if rows:
            pages += pages_for(length + rows, page_size) - length // page_size
        most = max(most, pages)
    return most


class ScoreProgress(JobProgress):
    def __init__(
        self,
        job: ScoreJob,
        layout: ScoreLayout,
        ticket: Ticket,
        *,
        cache: KvCache,
        max_item_rows: int,
    ) -> None:
        super().__init__(job, ticket)
        self._job = job
        self._cache = cache
        self._layout = layout
        self._options = RunOptions(
            layout=layout, classify=job.classify, kernel=job.kernel, max_item_rows=max_item_rows
        )
        self._num_started = 0  # of layout.contexts
        self._runs: list[ContextRun] = []  # contexts that hold pages, or will
        self._pieces: dict[int, StepPieces] = {}  # by step
        self._logprobs = np.empty(len(job.gather_ids), np.float32)
        self._logprobs.fill(np.nan)
        self._argmax = np.empty(len(job.gather_unit), np.int32)
        self._argmax.fill(-1)
        self._class_scores = np.zeros((0, 0), np.float32)
        self._unit_failed = np.zeros(len(layout.unit_rows), np.bool_)
        self._has_failed = False  # some unit
        self._unit_reads = np.bincount(job.gather_unit, minlength=len(layout.unit_rows))
        if job.classify:
            self._unit_reads += 1  # what is still to be read of each unit
        self._computed_rows = 0
        self._cached_tokens = 0

    @property
    def has_started(self) -> bool:
        return self._num_started > 0 or not len(self._layout.contexts)

    @property
    def holds_pages(self) -> bool:
        return any(run.chain is not None or run.scratch is not None for run in self._runs)

    @property
    def has_rows_to_plan(self) -> bool:
        started_all = self._num_started == len(self._layout.contexts)
        return not started_all or not all(run.is_planned for run in self._runs)

    def plan(self, step: StepBuilder) -> None:
        pieces = StepPieces()
        for run in self._runs:
            run.plan(step, pieces)
        # Contexts get pages when their turn has come, so a job may have more than the pool.
        while step.room and self._num_started < len(self._layout.contexts):
            started = self._start(int(self._layout.contexts[self._num_started]), step)
            if started is None:
                step.pages_blocked = True
                break
            self._num_started += 1
            self._runs.append(started)
            started.plan(step, pieces)
        if pieces.runs:
            self._pieces[step.step_id] = pieces
        self._drop_finished_runs()

    def deliver(self, outputs: StepOutputs) -> list[Event]:
        pieces = self._pieces.pop(outputs.step_id, StepPieces())
        for read in pieces.reads:
            failed = self._take_read(read, outputs)
            if read.node is not None and failed:
                self._cache.tree.discard(read.node)
        for piece in pieces.classes:
            if not len(self._class_scores):
                shape = (len(self._unit_failed), outputs.class_scores.shape[1])
                self._class_scores = np.full(shape, np.nan, np.float32)
            inside = slice(piece.class_at, piece.class_at + len(piece.units))
            self._class_scores[piece.units] = outputs.class_scores[inside]
            if outputs.has_failed:
                self._unit_failed[piece.units[outputs.class_failed[inside]]] = True
                self._has_failed = True
            np.subtract.at(self._unit_reads, piece.units, 1)
        for run in pieces.runs:
            run.pending_steps -= 1
        self._drop_finished_runs()
        return self._parts(pieces) if self._job.parts else []

    def _take_read(self, read: ReadPiece, outputs: StepOutputs) -> bool:
        """Whether some of it was not finite."""
        reads, first, end = read.reads, read.first, read.end
        first_id, end_id = int(reads.indptr[first]), int(reads.indptr[end])
        values = outputs.gather_logprobs[read.id_at : read.id_at + end_id - first_id]
        inside = slice(read.gather_at, read.gather_at + end - first)
        units = reads.unit[first:end]
        if reads.as_sent:  # so that places are slices
            self._logprobs[first_id:end_id] = values
            self._argmax[first:end] = outputs.gather_argmax[inside]
            self._unit_reads[first:end] -= 1
        else:
            self._logprobs[reads.id_index[first_id:end_id]] = values
            self._argmax[reads.index[first:end]] = outputs.gather_argmax[inside]
            np.subtract.at(self._unit_reads, units, 1)
        failed = outputs.gather_failed[inside]
        if not (outputs.has_failed and failed.any()):
            return False
        self._unit_failed[units[failed]] = self._has_failed = True
        return True

    def finish(self, now: float) -> Event | None:
        self._drop_finished_runs()  # what was left of one may have been computed for another job
        if self._runs or self._num_started < len(self._layout.contexts):
            return None
        return self._result(now)

    def expire(self, now: float) -> Event:
        if not self._job.partial:
            return super().expire(now)
        if self._job.classify and not len(self._class_scores):
            self._class_scores = np.full((len(self._unit_failed), 1), np.nan, np.float32)
        return self._result(now)

    def _parts(self, pieces: StepPieces) -> list[Event]:
        """What the step has read to its end."""
        touched = [read.reads.unit[read.first : read.end] for read in pieces.reads]
        units = np.unique(join_int32([*touched, *(piece.units for piece in pieces.classes)]))
        units = units[self._unit_reads[units] == 0]
        if not len(units):
            return []
        part = ScorePart(
            request_id=self.request_id,
            units=units,
            failed_units=units[self._unit_failed[units]],
            gather_logprobs=self._logprobs,
            gather_argmax=self._argmax,
            class_scores=self._class_scores,
        )
        return [part]

    def _result(self, now: float) -> ScoreResult:
        unread, failed = NO_INT32, NO_INT32
        if self._unit_reads.any():
            unread = np.flatnonzero(self._unit_reads > 0).astype(np.int32)
        if self._has_failed:
            failed = np.flatnonzero(self._unit_failed).astype(np.int32)
        return ScoreResult(
            request_id=self.request_id,
            gather_logprobs=self._logprobs,
            gather_argmax=self._argmax,
            class_scores=self._class_scores,
            failed_units=failed,
            unread_units=unread,
            usage=self._usage(unread),
            timing=self.timing(now),
        )

    def _usage(self, unread: Int32) -> JobUsage:
        """Of the units that were read; what is planned for others counts as computed too."""
        job, prompt = self._job, self._layout.prompt_tokens
        if len(unread):
            lengths = np.diff(job.unit_indptr) + self._layout.context_lengths[job.unit_context]
            prompt -= int(lengths[unread].sum(dtype=np.int64))
        computed = self._computed_rows + sum(r.computed_rows + r.item_rows for r in self._runs)
        return JobUsage(
            prompt_tokens=prompt,
            cached_tokens=self._cached_tokens,
            shared_tokens=max(0, prompt - self._cached_tokens - computed),
            computed_tokens=computed,
            kv_read_bytes=self.kv_read_bytes,
            kv_avoided_bytes=self.kv_avoided_bytes,
        )

    def release(self) -> None:
        for run in self._runs:
            self._release_run(run)
        self._runs = []

    def held_nodes(self) -> list[PageNode]:
        return [node for run in self._runs if run.chain is not None for node in run.chain.nodes]

    def recheck(self) -> None:
        for run in self._runs:
            if run.chain is not None:
                run.chain.recheck()

    def _start(self, context: int, step: StepBuilder) -> ContextRun | None:
        """Hold all pages that the context will need, so that it never waits for more."""
        tokens = self._job.contexts[context]
        rows = longest_paged_unit(self._layout, context, self._options.max_item_rows)
        if not len(tokens) and not rows:
            return ContextRun(context, self._options, None, None)
        if step.pages_blocked:
            return None
        size = self._cache.page_size
        own_pages = pages_for(len(tokens) + rows, size) - len(tokens) // size if rows else 0
        pages = self._cache.allocate(own_pages)
        if pages is None:
            return None
        chain = None
        if len(tokens):
            chain = self._cache.acquire(tokens, self._job.realm(context), step, own_tail=False)
            if chain is None:
                self._cache.allocator.free(pages)
                return None
        scratch = None
        if rows:
            scratch = Branch(chain, capacity=len(tokens) + rows, page_size=size)
            scratch.add_pages(pages)
        return ContextRun(context, self._options, chain, scratch)

    def _drop_finished_runs(self) -> None:
        left: list[ContextRun] = []
        for run in self._runs:
            if run.pending_steps or not run.is_planned:
                left.append(run)
                continue
            self._computed_rows += run.computed_rows + run.item_rows
            if run.chain is not None:
                self._cached_tokens += run.chain.length - run.computed_rows
            self._release_run(run)
        self._runs = left

    def _release_run(self, run: ContextRun) -> None:
        if run.scratch is not None:
            self._cache.drop(run.scratch)
        if run.chain is not None:
            self._cache.tree.release(run.chain.nodes)
