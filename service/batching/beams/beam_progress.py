"""How far a beam search has come: its prompt once, then a row for each beam, a round at a time.

The beams of the next round are known once all rows of this one are answered, so a search has no
rows beyond them in flight. One that gave its pages up begins again.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.beams.beam_pages import BeamPages
from stemserve.service.batching.beams.beam_search import BeamSearch
from stemserve.service.batching.jobs.decoding_progress import DecodingProgress
from stemserve.service.batching.jobs.job_progress import Ticket
from stemserve.service.batching.mask_work import Aside, MaskWork
from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.pages.places import Places
from stemserve.service.batching.pages.sequence import Chain, pages_for
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.batching.steps.step_outputs import StepOutputs
from stemserve.service.errors import EngineFault, RequestError
from stemserve.service.request import (
    BeamSpec,
    Event,
    Float32,
    GenerateChunk,
    GenerateJob,
    Int32,
    JobFailed,
    JobUsage,
)


def beam_pages(job: GenerateJob, beams: BeamSpec, page_size: int) -> int:
    """The most pages that the job needs: the last token's KV is never stored."""
    prompt = len(job.prompt)
    stored = pages_for(prompt + job.max_new_tokens - 1, page_size)
    prompt_pages = pages_for(prompt, page_size)
    if job.max_new_tokens == 1:
        return prompt_pages
    return prompt_pages + beams.width * (stored - prompt // page_size)


class _Read(NamedTuple):
    """Rows of a step in flight."""

    beams: range
    first: int  # of them in the step's samples, where they follow one another


class BeamProgress(DecodingProgress):
    def __init__(
        self,
        job: GenerateJob,
        beams: BeamSpec,
        ticket: Ticket,
        *,
        places: Places,
        masks: MaskWork,
    ) -> None:
        """Raises InvalidRequest where the job's constraint leaves no first token."""
        super().__init__(job, ticket)
        self._job = job
        self._spec = beams
        self._cache = places.cache
        self._slots = places.slots
        self._vocab_size = places.vocab_size
        self._masks = masks
        self._counted_tokens = 0  # of the prompt: leading tokens that usage has counted
        self._computed_rows = 0
        self._begin_again()

    def _begin_again(self) -> None:
        """Nothing is held, planned or known."""
        self._chain: Chain | None = None
        self._pages: BeamPages | None = None
        self._taken: list[int] = []  # sampler slots, one a beam
        self._announced = 0  # of them: the worker has their parameters
        self._prompt_is_planned = False
        self._reads: dict[int, _Read] = {}  # by step
        self._advancing: Aside[Int32] | None = None  # the search, in another thread
        self._search = BeamSearch(self._job, self._spec, vocab_size=self._vocab_size)
        self._next_round()

    def _next_round(self) -> None:
        self.num_live = self._search.num_live
        shape = (self.num_live, self._search.candidates)
        self._planned = 0  # leading beams whose rows are planned
        self._answered = 0
        self._ids: Int32 = np.zeros(shape, np.int32)
        self._logprobs: Float32 = np.zeros(shape, np.float32)

    @property
    def has_started(self) -> bool:
        return self._chain is not None

    @property
    def holds_pages(self) -> bool:
        return self._chain is not None

    @property
    def has_rows_to_plan(self) -> bool:
        return not self._prompt_is_planned

    @property
    def awaits_result(self) -> bool:
        return self._planned == self.num_live > 0 and self.in_flight > 0

    @property
    def may_burst(self) -> bool:
        return False

    @property
    def is_decoding(self) -> bool:
        return self._prompt_is_planned and not self.is_yielding

    def missing_pages(self, steps: int) -> int:
        return self.num_live * pages_for(steps, self._cache.page_size)

    def plan(self, step: StepBuilder) -> None:
        self.lacks_pages = False
        if self.is_yielding or not step.room or self._prompt_is_planned:
            return
        chain = self._chain or self._start(step)
        if chain is None:
            return
        chunk = step.prefill(chain, self._job.kernel, reads_from=chain.length - 1)
        if chunk.start < chunk.stop:
            self._computed_rows += max(0, chunk.stop - max(chunk.start, self._counted_tokens))
            self._counted_tokens = max(self._counted_tokens, chunk.stop)
        if chunk.stop == chain.length and chunk.last_row >= 0:
            self._prompt_is_planned = True
            self._read(step, range(1), range(chunk.last_row, chunk.last_row + 1))

    def plan_decodes(self, step: StepBuilder, limit: int) -> bool:
        """Add a row for each beam of this round that has none."""
        search, pages = self._search, self._pages
        if pages is None or self._planned == self.num_live:
            return True
        start = len(self._job.prompt) + search.length - 1
        first = self._planned
        end = min(self.num_live, first + limit - step.rows.num_rows)
        end = pages.prepare(first, end, start, step)
        if first < end:
            tokens: list[int] = search.last_tokens[first:end].tolist()
            beams = pages.rows(first, end, start)
            rows = step.rows.add_beams(tokens, beams, self._job.kernel)
            self._read(step, range(first, end), rows)
        return self._planned == self.num_live or step.rows.num_rows >= limit

    def deliver(self, outputs: StepOutputs) -> list[Event]:
        read = self._reads.pop(outputs.step_id, None)
        if read is None:
            return []
        search, beams, drawn = self._search, read.beams, outputs.drawn
        if drawn.some_failed(read.first, len(beams)):
            return [self._not_finite()]
        found = drawn.top_arrays(read.first, search.counts(beams), search.candidates)
        self._ids[beams.start : beams.stop], self._logprobs[beams.start : beams.stop] = found
        self._answered += len(read.beams)
        if self._answered < self.num_live:
            return []
        advance = partial(search.advance, self._ids, self._logprobs)
        if not search.masks_take_long:
            return self._go_on(advance)
        self._advancing = self._masks.add(self.arrival, advance)
        return []

    def collect(self) -> list[Event]:
        advancing = self._advancing
        if advancing is None or not advancing.is_done:
            return []
        self._advancing = None
        return self._go_on(advancing.take)

    def _go_on(self, advance: Callable[[], Int32]) -> list[Event]:
        search = self._search
        try:
            parents = advance()
        except RequestError as error:
            return [JobFailed(request_id=self.request_id, error=error)]
        if not search.is_done:
            self._fork(parents)
        self._next_round()
        return [self._found()] if search.is_done else []

    def finish(self, now: float) -> GenerateChunk | None:
        if self._advancing is not None or not self._search.is_done:
            return None
        prompt = len(self._job.prompt)
        usage = JobUsage(
            prompt_tokens=prompt,
            cached_tokens=prompt - self._computed_rows,
            computed_tokens=self._computed_rows,
            output_tokens=self._search.output_tokens,
            kv_read_bytes=self.kv_read_bytes,
            kv_avoided_bytes=self.kv_avoided_bytes,
        )
        return GenerateChunk(self.request_id, (), usage, self.timing(now))

    def release(self) -> None:
        if self._pages is not None:
            self._pages.drop()
        if self._chain is not None:
            self._cache.tree.release(self._chain.nodes)
        for slot in self._taken:
            self._slots.give_back(slot)
        self.is_yielding = False
        self._begin_again()

    def held_nodes(self) -> list[PageNode]:
        return [] if self._chain is None else self._chain.nodes

    def recheck(self) -> None:
        # Of a lost step in which the prompt's last row was read, the job is lost too.
        if self._chain is not None:
            self._chain.recheck()

    def _start(self, step: StepBuilder) -> Chain | None:
        """Hold pages for the prompt, and slots; leaves room for the beams' first pages."""
        job, cache, width = self._job, self._cache, self._spec.width
        if step.slots_blocked or self._slots.num_free < width:
            step.slots_blocked = True
            return None
        needed = cache.missing_pages(job.prompt, job.realm) + step.rows.num_decodes
        needed += width * (job.max_new_tokens > 1)
        others_hold_pages = cache.available_pages < cache.allocator.num_pages
        if step.pages_blocked or (needed > cache.available_pages and others_hold_pages):
            step.pages_blocked = True
            return None
        self._chain = cache.acquire(job.prompt, job.realm, step, own_tail=True)
        if self._chain is None:
            step.pages_blocked = True
            return None
        self._taken = self._slots.take(width)
        return self._chain

    def _fork(self, parents: Int32) -> None:
        prompt = len(self._job.prompt)
        if self._pages is None and self._chain is not None:
            capacity = prompt + self._job.max_new_tokens - 1
            self._pages = BeamPages(self._cache, self._chain, capacity=capacity)
        if self._pages is not None:
            self._pages.fork(parents, prompt + self._search.length - 1)

    def _read(self, step: StepBuilder, beams: range, rows: range) -> None:
        """Read the likeliest next tokens of beams at their rows."""
        search, readouts = self._search, step.readouts
        slots = self._taken[beams.start : beams.stop]
        for slot in self._taken[self._announced : beams.stop]:
            readouts.add_sampler(_reader(slot, search))
        self._announced = max(self._announced, beams.stop)
        if search.is_guided:
            for beam, slot in zip(beams, slots, strict=True):
                if (mask := search.mask(beam)) is not None:
                    readouts.add_mask(slot, mask)
        first = readouts.add_samples(rows, slots, search.length)
        self._reads[step.step_id] = _Read(beams, first)
        self._planned += len(beams)

    def _not_finite(self) -> JobFailed:
        if not self._search.length and self._chain is not None:
            self._cache.tree.discard(self._chain.nodes[-1])
        error = EngineFault(
            f"the model's logits for token {self._search.length} of a beam are not finite numbers"
        )
        return JobFailed(request_id=self.request_id, error=error)

    def _found(self) -> GenerateChunk:
        search = self._search
        return GenerateChunk(self.request_id, search.answer(), searched_tokens=search.lost_tokens)


def _reader(slot: int, search: BeamSearch) -> worker_pb2.Sampler:
    """A sampler that draws no token: the likeliest ones are read."""
    return worker_pb2.Sampler(slot=slot, top_logprobs=search.candidates, reads_only=True)
