"""How far a Generate job has come: its prompt once, then a row a step for each sample."""

from functools import partial

from stemserve.service.batching.jobs.decoding_progress import DecodingProgress
from stemserve.service.batching.jobs.job_progress import Ticket
from stemserve.service.batching.mask_work import MaskWork
from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.pages.sampler_slots import SamplerSlots
from stemserve.service.batching.pages.sequence import Chain
from stemserve.service.batching.samples.guide import Guide
from stemserve.service.batching.samples.prompt_reads import PromptReads
from stemserve.service.batching.samples.sample import Draw, Sample
from stemserve.service.batching.samples.sample_pages import Room, SamplePages
from stemserve.service.batching.samples.sample_rows import SampleRows, job_drafter
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.batching.steps.step_outputs import StepOutputs
from stemserve.service.errors import EngineFault
from stemserve.service.request import (
    Event,
    GenerateChunk,
    GenerateJob,
    JobFailed,
    JobUsage,
    SampleTokens,
)


class GenerateProgress(DecodingProgress):
    def __init__(
        self,
        job: GenerateJob,
        ticket: Ticket,
        *,
        cache: KvCache,
        slots: SamplerSlots,
        masks: MaskWork,
    ) -> None:
        """Raises InvalidRequest where the job's constraint leaves no first token."""
        super().__init__(job, ticket)
        self._job = job
        self._cache = cache
        self._slots = slots
        self._prompt_is_planned = False  # computed, and its last row read, by issued steps
        rules, start = job.constraint, partial(masks.add, ticket.arrival)
        self._samples = [
            Sample(
                index=i,
                spec=spec,
                guide=None if rules is None else Guide(rules, spec, job.stop_ids, start),
                drafter=job_drafter(job, spec),
            )
            for i, spec in enumerate(job.samplers)
        ]
        self._pages = SamplePages(job, self._samples, cache)
        self._rows = SampleRows(job, self._samples, self._pages)
        self._draws: dict[int, list[Draw]] = {}  # by step
        self._counted_tokens = 0  # of the prompt: leading tokens that usage has counted
        self._computed_rows = 0
        self._reads = PromptReads(job.prompt) if job.prompt_logprobs else None
        self._resumes = False  # it gave its pages up: rows of its samples must run again
        self.output_tokens = 0  # delivered
        self.num_live = len(self._samples)  # samples that have not ended

    @property
    def has_started(self) -> bool:
        return self._pages.chain is not None

    @property
    def holds_pages(self) -> bool:
        return self._pages.chain is not None

    @property
    def has_rows_to_plan(self) -> bool:
        if self._resumes and self._prompt_is_planned:
            self._resumes = any(map(self._lacks_rows, self._samples))
        return self._resumes or not self._prompt_is_planned

    @property
    def is_decoding(self) -> bool:
        """Its samples may have decode rows."""
        return self._prompt_is_planned and not self.is_yielding

    @property
    def may_burst(self) -> bool:
        """Not under a constraint: what it may draw depends on the token before."""
        return self._job.constraint is None

    @property
    def draft_tokens(self) -> int:
        return self._rows.draft_tokens

    @property
    def expected_tokens(self) -> float:
        return self._rows.expected_tokens

    def missing_pages(self, steps: int) -> int:
        """Pages that its samples lack for so many rows more, or as many as they have left."""
        return sum(
            self._pages.branch(sample).missing_pages(
                sample.stored + min(steps, self._job.max_new_tokens - sample.num_tokens)
            )
            for sample in self._samples
            if sample.is_ready(self._job, sample.num_tokens)
        )

    def plan_decodes(self, step: StepBuilder, limit: int) -> bool:
        """Add the next row of each sample, in a burst the next ones, while the step has fewer rows
        than `limit`. False: there is no page for one now."""
        rows, size, most = step.rows, self._cache.page_size, self._job.max_new_tokens
        draws: list[Draw] = []
        room = Room.FOUND
        for sample in self._samples:
            drawn, start = len(sample.tokens) + sample.pending, sample.stored
            if not sample.is_ready(self._job, drawn):
                continue
            if step.verifies and self._rows.holds(sample):
                continue
            if rows.num_rows >= limit:
                break
            end = start + min(step.max_steps, most - drawn)
            branch = sample.branch or self._pages.branch(sample)
            if end > branch.num_pages * size:
                room = self._pages.make_room(branch, end, step)
                if room is Room.LATER:
                    continue
                if room is Room.NONE:
                    break
            token = -1 - sample.slot if sample.pending else sample.tokens[-1]
            row = rows.add_decode(token, start, end, branch, self._job.kernel)
            draws.append(self._rows.draw(sample, row, step, end - start))
            sample.stored = end
        if draws:
            self._draws[step.step_id] = draws
        return room is not Room.NONE

    def find_drafts(self) -> bool:
        return self._rows.find_drafts()

    def plan_drafts(self, step: StepBuilder, limit: int) -> bool:
        draws, found = self._rows.plan_drafts(step, limit)
        for draw in draws:
            self._note(draw, step)
        return found

    def plan(self, step: StepBuilder) -> None:
        self.lacks_pages = False
        if self.is_yielding or not step.room:
            return
        chain = self._pages.chain or self._pages.start(step, self._slots)
        if chain is None:
            return
        if not self._prompt_is_planned:
            self._plan_prompt(step, chain)
        if not self._prompt_is_planned:
            return
        for sample in filter(self._lacks_rows, self._samples):
            if not step.room:
                break
            draw, found = self._rows.plan_lost(sample, step)
            if draw is not None:
                self._note(draw, step)
            self.lacks_pages = self.lacks_pages or not found

    def deliver(self, outputs: StepOutputs) -> list[Event]:
        news: list[SampleTokens] = []
        failure: JobFailed | None = None
        if self._reads and (bad := self._reads.deliver(outputs)):
            self._cache.tree.discard(bad)
            failure = self._failed("a token of the prompt")
        for draw in self._draws.pop(outputs.step_id, ()):
            sample = draw.sample
            sample.pending -= draw.steps
            if not sample.has_ended:
                taken = sample.take(draw, outputs.drawn, self._job)
                count = len(taken.token_ids)
                self._rows.note(draw, taken.token_ids)
                if count:
                    news.append(taken)
                    self.output_tokens += count
                if sample.guide is not None and sample.guide.fault is not None:
                    failure = JobFailed(request_id=self.request_id, error=sample.guide.fault)
                elif sample.has_ended:
                    self.num_live -= 1
                elif draw.lacks(taken.token_ids):
                    failure = self._failure(sample, draw.node)
            if sample.has_ended:
                self._settle(sample)
        if failure is not None:
            return [failure]
        return [GenerateChunk(self.request_id, news)] if news else []

    def collect(self) -> list[Event]:
        news: list[SampleTokens] = []
        for sample in self._samples:
            ended = sample.collect_mask()
            if ended is not None:
                self.num_live -= 1
                news.append(ended)
                self._settle(sample)
            elif sample.guide is not None and sample.guide.fault is not None:
                return [JobFailed(request_id=self.request_id, error=sample.guide.fault)]
        self._resumes = True  # rows that had to wait for a mask may be lacking
        return [GenerateChunk(self.request_id, news)] if news else []

    def stop_sample(self, index: int) -> None:
        sample = self._samples[index]
        self.num_live -= not sample.has_ended
        sample.has_ended = True
        self._settle(sample)

    def finish(self, now: float) -> GenerateChunk | None:
        if self.num_live:
            return None
        prompt = len(self._job.prompt)
        cached = prompt - self._computed_rows
        usage = JobUsage(
            prompt_tokens=prompt * len(self._samples),
            cached_tokens=cached,
            shared_tokens=prompt * (len(self._samples) - 1),
            computed_tokens=self._computed_rows,
            output_tokens=self.output_tokens,
            kv_read_bytes=self.kv_read_bytes,
            kv_avoided_bytes=self.kv_avoided_bytes,
            drafted_tokens=self._rows.drafted_tokens,
            accepted_tokens=self._rows.accepted_tokens,
        )
        logprobs = self._reads.logprobs if self._reads else None
        return GenerateChunk(self.request_id, (), usage, self.timing(now), logprobs)

    def release(self) -> None:
        for sample in self._samples:
            self._release_sample(sample)
        self._pages.release_prompt()
        self._prompt_is_planned = self.is_yielding = False
        self._resumes = True

    def held_nodes(self) -> list[PageNode]:
        chain = self._pages.chain
        return [] if chain is None else chain.nodes

    def recheck(self) -> None:
        chain = self._pages.chain
        if chain is not None:
            chain.recheck()
            # A prompt that was found computed has had no row of its own in the lost step.
            if chain.planned_tokens() < chain.length:
                self._prompt_is_planned, self._resumes = False, True

    def _plan_prompt(self, step: StepBuilder, chain: Chain) -> None:
        live = [sample for sample in self._samples if not sample.has_ended]
        draws = [sample for sample in live if not sample.tokens]
        reads_from = chain.length - bool(draws)
        reads_from = min(reads_from, self._reads.next_row) if self._reads else reads_from
        chunk = step.prefill(chain, self._job.kernel, reads_from=reads_from)
        if chunk.start < chunk.stop:
            self._computed_rows += max(0, chunk.stop - max(chunk.start, self._counted_tokens))
            self._counted_tokens = max(self._counted_tokens, chunk.stop)
            if self._reads:
                self._reads.plan(step, chunk, chain)
        if chunk.stop == chain.length:
            self._prompt_is_planned = True
            for sample in draws:
                self._note(self._rows.draw(sample, chunk.last_row, step, 1, chain.nodes[-1]), step)
            for sample in live:
                sample.stored = chain.length

    def _failure(self, sample: Sample, node: PageNode | None) -> JobFailed:
        if node is not None:
            self._cache.tree.discard(node)
        return self._failed(f"token {len(sample.tokens)} of sample {sample.index}")

    def _failed(self, place: str) -> JobFailed:
        error = EngineFault(f"the model's logits for {place} are not finite numbers")
        return JobFailed(request_id=self.request_id, error=error)

    def _lacks_rows(self, sample: Sample) -> bool:
        return sample.lacks_rows(self._job)

    def _note(self, draw: Draw, step: StepBuilder) -> None:
        self._draws.setdefault(step.step_id, []).append(draw)

    def _settle(self, sample: Sample) -> None:
        """A sample that has ended leaves its pages in the tree when its last row is answered."""
        if sample.has_ended and not sample.pending:
            self._pages.settle(sample)
            self._release_sample(sample)

    def _release_sample(self, sample: Sample) -> None:
        self._pages.drop(sample)
        if sample.slot >= 0:
            self._slots.give_back(sample.slot)
            sample.slot = -1
        sample.is_announced = False
        sample.stored = 0
