"""Fill a step: decode rows first, then prefill chunks and items in the order of work.

Long jobs leave part of a step to short ones of their priority that wait, so that nobody with a few
rows waits behind thousands.
"""

from collections.abc import Iterator, Sequence
from heapq import merge

from stemserve.service.batching.jobs.decoding_progress import DecodingProgress
from stemserve.service.batching.jobs.job_progress import JobProgress
from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.sequence import pages_for
from stemserve.service.batching.queue.admission import BatcherLimits
from stemserve.service.batching.queue.job_table import JobTable
from stemserve.service.batching.samples.speculation import Speculation, Stage
from stemserve.service.batching.steps.burst_size import BurstSize
from stemserve.service.batching.steps.step_builder import IssuedStep, StepBuilder

# Biases and bans of a step; those of the last job in it may come on top.
MAX_SAMPLER_BYTES = 16 << 20


class StepPlanner:
    def __init__(
        self, jobs: JobTable, limits: BatcherLimits, cache: KvCache, burst: BurstSize
    ) -> None:
        self._jobs = jobs
        self._limits = limits
        self._cache = cache
        self._burst = burst
        self._speculation = Speculation(limits.drafts)
        self.suspensions = 0  # of generations
        self._waiting_is_stuck = False  # the last step had room, but no pages or slots
        self._passed_over: set[int] = set()  # generations that found no room in the last step

    @property
    def draft_steps(self) -> int:
        return self._speculation.steps

    @property
    def may_find_rows(self) -> bool:
        """False: all that is left to do is in flight."""
        return len(self._jobs.waiting) > 0 or any(
            (job.decodes and not job.awaits_result) or job.has_rows_to_plan
            for job in self._jobs.running
        )

    def plan(self, step: StepBuilder) -> None:
        decoding = [job for job in self._generations() if job.is_decoding]
        nobody_waits = not self._others_wait()
        stage = self._speculation.stage(decoding, nobody_waits=nobody_waits)
        if stage is Stage.WAIT:
            return
        if stage is Stage.VERIFY:
            step.verifies = any([job.find_drafts() for job in decoding])
        if nobody_waits and not step.verifies:
            step.max_steps = self._burst_steps(decoding)
        if decoding:
            self._plan_decodes(step, decoding, nobody_waits=nobody_waits)
        else:
            self._passed_over = set()
        if step.rows.repeat > 1:
            self._waiting_is_stuck = False  # who waits is looked at before the next burst
            return
        self._waiting_is_stuck = False
        short_room = self._short_room(step)
        started: list[JobProgress] = []
        for job, waits in self._in_order():
            step.reserved = short_room if self._is_long(job) else 0
            if not step.room:
                break
            room = step.room
            self._try(job, step, waits=waits, started=started)
            if not self._is_long(job):
                short_room = max(0, short_room - (room - step.room))
        step.reserved = 0
        if short_room and step.room:
            for job in self._jobs.waiting.short():
                if job not in started and step.room:
                    self._try(job, step, waits=True, started=started)
        for job in started:
            self._jobs.start(job)
        if step.room:
            self._waiting_is_stuck = step.pages_blocked or step.slots_blocked

    def _try(
        self, job: JobProgress, step: StepBuilder, *, waits: bool, started: list[JobProgress]
    ) -> None:
        if waits and step.pages_blocked:
            return
        self._plan_job(job, step)
        if waits and job.has_started:
            started.append(job)

    def _is_long(self, job: JobProgress) -> bool:
        return job.cost_tokens > self._limits.short_tokens

    def _short_room(self, step: StepBuilder) -> int:
        """Rows that short jobs of the highest priority could use, up to their part of a step, if
        there is a long one that would take them."""
        short_waits, long_waits = self._jobs.waiting.has_short_and_long
        if not short_waits or not (long_waits or any(map(self._is_long, self._jobs.running))):
            return 0
        limit, needed = min(self._limits.max_short_rows, step.max_rows // 4), 0
        running = max((job.priority for job in self._jobs.running), default=None)
        for job in self._jobs.waiting.short():
            if needed >= limit or (running is not None and job.priority < running):
                break
            needed += job.cost_tokens
        return min(limit, needed)

    def learn(self, issued: IssuedStep, seconds: float, now: float) -> None:
        """How long an answered step took."""
        self._speculation.learn(issued, seconds, now)
        if issued.decode_rows == issued.num_rows and not issued.draft_tokens:
            self._burst.observe(issued.num_rows, issued.repeat, seconds, now)
        else:
            self._burst.answered(now)

    def suspend_yielding(self) -> bool:
        """Take the pages of generations that yield, once none of their rows is in flight."""
        suspended = [job for job in self._generations() if job.is_yielding and not job.in_flight]
        for job in suspended:
            job.release()
            self._jobs.requeue(job)
        self.suspensions += len(suspended)
        return bool(suspended)

    def _in_order(self) -> Iterator[tuple[JobProgress, bool]]:
        running = [(job, False) for job in self._jobs.running if job.has_rows_to_plan]
        if not len(self._jobs.waiting):
            return iter(running)
        waiting = ((job, True) for job in self._jobs.waiting)
        if not running:
            return waiting
        # What has started goes on before what waits.
        return merge(running, waiting, key=lambda pair: -pair[0].priority)

    def _plan_job(self, job: JobProgress, step: StepBuilder) -> None:
        if job.decodes and step.readouts.sampler_bytes > MAX_SAMPLER_BYTES:
            return
        share = step.begin(job.arrival)
        room = step.room
        job.plan(step)
        share.prefill_rows += room - step.room
        job.planned_rows += room - step.room
        if job.decodes and isinstance(job, DecodingProgress) and job.lacks_pages:
            step.pages_blocked = True
            self._make_room(job)

    def _plan_decodes(
        self, step: StepBuilder, decoding: Sequence[DecodingProgress], *, nobody_waits: bool
    ) -> None:
        limit = step.max_rows
        if not nobody_waits:
            limit = min(limit, self._limits.max_decode_rows, max(1, limit // 4))
        passed_over: set[int] = set()
        order = self._decode_order(decoding)
        for job in order:
            if step.rows.num_rows >= limit:
                passed_over.add(job.arrival)
                continue
            share = step.begin(job.arrival)
            rows = step.rows.num_rows
            if not job.plan_decodes(step, limit):
                step.pages_blocked = True
                self._make_room(job)
            share.decode_rows += step.rows.num_rows - rows
        self._passed_over = passed_over
        if step.verifies:
            self._plan_drafts(step, [job for job in order if job.arrival not in passed_over])

    def _plan_drafts(self, step: StepBuilder, decoding: Sequence[DecodingProgress]) -> None:
        for job in decoding:
            share = step.begin(job.arrival)
            rows = step.rows.num_rows
            if not job.plan_drafts(step, step.max_rows):
                step.pages_blocked = True
                self._make_room(job)
            share.decode_rows += step.rows.num_rows - rows

    def _burst_steps(self, decoding: Sequence[DecodingProgress]) -> int:
        """As many as there are pages for."""
        if not self._burst.is_possible:
            return 1
        if not all(job.may_burst for job in decoding):
            return 1
        rows = sum(job.num_live for job in decoding)
        steps, room = self._burst.steps(rows), self._cache.available_pages
        while steps > 1 and not self._fits(decoding, steps, rows, room):
            steps //= 2
        return steps

    def _fits(self, decoding: Sequence[DecodingProgress], steps: int, rows: int, room: int) -> bool:
        most_for_a_row = pages_for(steps, self._cache.page_size) + 1
        return rows * most_for_a_row <= room or (
            sum(job.missing_pages(steps) for job in decoding) <= room
        )

    def _decode_order(self, decoding: Sequence[DecodingProgress]) -> Sequence[DecodingProgress]:
        """Of one priority, those that the last step passed over go first."""
        if not self._passed_over:
            return decoding
        return sorted(
            decoding,
            key=lambda job: (-job.priority, job.arrival not in self._passed_over),
        )

    def _others_wait(self) -> bool:
        if len(self._jobs.waiting) and not self._waiting_is_stuck:
            return True
        return any(job.has_rows_to_plan for job in self._jobs.running)

    def _generations(self) -> list[DecodingProgress]:
        if not self._jobs.num_decoding:
            return []
        return [job for job in self._jobs.running if isinstance(job, DecodingProgress)]

    def _make_room(self, needer: DecodingProgress) -> None:
        """Have a generation behind `needer` yield its pages; the oldest always goes on."""
        generations = self._generations()
        if self._jobs.ending or any(job.is_yielding for job in generations):
            return  # their pages come free soon
        behind = [job for job in generations if job.order > needer.order and job.holds_pages]
        if behind:
            behind[-1].is_yielding = True
        elif not any(job.holds_pages for job in self._jobs.running if job is not needer):
            # It holds more than it must (its samples' copies beside the original): start again.
            needer.is_yielding = True
