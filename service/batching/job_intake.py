"""Take a job in: check what it needs, and set its progress up."""

from collections.abc import Callable
from dataclasses import replace

from stemserve.service.batching.beams.beam_progress import BeamProgress, beam_pages
from stemserve.service.batching.jobs.job_progress import JobProgress, Ticket
from stemserve.service.batching.mask_work import MaskWork
from stemserve.service.batching.pages.places import Places
from stemserve.service.batching.queue.admission import Admission, Backlog, BatcherLimits, Demand
from stemserve.service.batching.queue.job_table import JobTable
from stemserve.service.batching.samples.generate_progress import GenerateProgress
from stemserve.service.batching.samples.sample_pages import generate_pages
from stemserve.service.batching.scores.score_layout import ScoreLayout, lay_out
from stemserve.service.batching.scores.score_progress import ScoreProgress, context_pages
from stemserve.service.request import BeamSpec, GenerateJob, Job, ScoreJob


class JobIntake:
    def __init__(
        self,
        limits: BatcherLimits,
        *,
        places: Places,
        admission: Admission,
        jobs: JobTable,
        masks: MaskWork,
        rows_in_flight: Callable[[], int],
    ) -> None:
        self._max_item_rows = limits.max_item_rows
        self._draft_tokens = limits.drafts.default_tokens
        self._places = places
        self._cache = places.cache
        self._admission = admission
        self._jobs = jobs
        self._masks = masks
        self._rows_in_flight = rows_in_flight

    def take(self, job: Job, *, arrival: int, now: float) -> JobProgress:
        """Raises RequestError where the job may not wait."""
        if isinstance(job, GenerateJob):
            if job.beams is not None:
                return self._take_beams(job, job.beams, arrival, now)
            return self._take_generate(job, arrival, now)
        return self._take_score(job, arrival, now)

    def _take_generate(self, job: GenerateJob, arrival: int, now: float) -> GenerateProgress:
        demand = self._prompt_demand(
            job, pages=generate_pages(job, self._cache.page_size), samples=len(job.samplers)
        )
        ticket = self._admit(job, demand, arrival, now)
        if job.draft_tokens is None:
            job = replace(job, draft_tokens=self._draft_tokens)
        return GenerateProgress(
            job, ticket, cache=self._cache, slots=self._places.slots, masks=self._masks
        )

    def _take_beams(
        self, job: GenerateJob, beams: BeamSpec, arrival: int, now: float
    ) -> BeamProgress:
        demand = self._prompt_demand(
            job, pages=beam_pages(job, beams, self._cache.page_size), samples=beams.width
        )
        ticket = self._admit(job, demand, arrival, now)
        return BeamProgress(job, beams, ticket, places=self._places, masks=self._masks)

    def _prompt_demand(self, job: GenerateJob, *, pages: int, samples: int) -> Demand:
        hits = 0  # rows that are read are run, whatever is stored
        if not job.prompt_logprobs:
            hits = min(self._cache.resident_tokens(job.prompt, job.realm), len(job.prompt) - 1)
        return Demand(
            pages=pages, samples=samples, tokens=len(job.prompt) - hits, cached_tokens=hits
        )

    def _take_score(self, job: ScoreJob, arrival: int, now: float) -> ScoreProgress:
        layout = lay_out(job)
        tokens = self._score_tokens(job, layout)
        demand = Demand(
            pages=context_pages(layout, self._max_item_rows, self._cache.page_size),
            samples=0,
            tokens=tokens,
            cached_tokens=max(0, layout.prompt_tokens - tokens),
        )
        ticket = self._admit(job, demand, arrival, now)
        return ScoreProgress(
            job, layout, ticket, cache=self._cache, max_item_rows=self._max_item_rows
        )

    def _score_tokens(self, job: ScoreJob, layout: ScoreLayout) -> int:
        """Rows that the job needs, after cache hits."""
        rows = len(layout.row_token)
        for context in map(int, layout.contexts):
            tokens = job.contexts[context]
            missing = len(tokens) - self._cache.resident_tokens(tokens, job.realm(context))
            rows += max(missing, layout.reads_context(context))
        return rows

    def _admit(self, job: Job, demand: Demand, arrival: int, now: float) -> Ticket:
        ticket = Ticket(
            priority=job.priority,
            tenant=job.tenant,
            deadline=job.deadline,
            arrival=arrival,
            submitted_s=now,
            cost_tokens=demand.tokens,
            pages=demand.pages,
            partial=isinstance(job, ScoreJob) and job.partial,
        )
        waiting = self._jobs.waiting
        backlog = Backlog(
            pinned_pages=self._places.pins.pages,
            requests=waiting.requests,
            tokens=waiting.tokens,
            tokens_before=self._jobs.running_tokens(job.priority) + waiting.tokens_before(ticket),
            unfinished_tokens=self._jobs.running_tokens() + self._rows_in_flight(),
        )
        self._admission.check(ticket, demand, backlog)
        return ticket
