"""Fill a step: decode rows first, then prefill chunks and items in the order of work."""

from collections.abc import Iterator
from heapq import merge

from stemserve.service.batching.admission import BatcherLimits
from stemserve.service.batching.generate_progress import GenerateProgress
from stemserve.service.batching.job_progress import JobProgress
from stemserve.service.batching.job_table import JobTable
from stemserve.service.batching.step_builder import StepBuilder

# Biases and bans of a step; those of the last job in it may come on top.
MAX_SAMPLER_BYTES = 16 << 20


class StepPlanner:
    def __init__(self, jobs: JobTable, limits: BatcherLimits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._waiting_is_stuck = False  # the last step had room, but no pages or slots

    def plan(self, step: StepBuilder) -> None:
        self._plan_decodes(step)
        self._waiting_is_stuck = False
        started: list[JobProgress] = []
        for job, waits in self._in_order():
            if not step.room:
                break
            if not (waits and step.pages_blocked):
                self._plan_job(job, step)
                if waits and job.has_started:
                    started.append(job)
        for job in started:
            self._jobs.start(job)
        if step.room:
            self._waiting_is_stuck = step.pages_blocked or step.slots_blocked

    def suspend_yielding(self) -> bool:
        """Take the pages of generations that yield, once none of their rows is in flight."""
        suspended = [job for job in self._generations() if job.is_yielding and not job.in_flight]
        for job in suspended:
            job.release()
            self._jobs.requeue(job)
        return bool(suspended)

    def _in_order(self) -> Iterator[tuple[JobProgress, bool]]:
        running = ((job, False) for job in list(self._jobs.running))
        waiting = ((job, True) for job in self._jobs.waiting)
        return merge(running, waiting, key=lambda pair: pair[0].order)

    def _plan_job(self, job: JobProgress, step: StepBuilder) -> None:
        if isinstance(job, GenerateProgress) and step.readouts.sampler_bytes > MAX_SAMPLER_BYTES:
            return
        share = step.begin(job.arrival)
        room = step.room
        job.plan(step)
        share.prefill_rows += room - step.room
        if isinstance(job, GenerateProgress) and job.lacks_pages:
            step.pages_blocked = True
            self._make_room(job)

    def _plan_decodes(self, step: StepBuilder) -> None:
        limit = self._limits.max_step_tokens
        if self._others_wait():
            limit = self._limits.max_decode_rows
        for job in self._generations():
            share = step.begin(job.arrival)
            room = step.room
            for sample in job.ready_samples():
                if step.rows.num_rows >= limit:
                    break
                if not job.plan_decode(sample, step):
                    step.pages_blocked = True
                    self._make_room(job)
                    break
            share.decode_rows += room - step.room

    def _others_wait(self) -> bool:
        if len(self._jobs.waiting) and not self._waiting_is_stuck:
            return True
        return any(job.has_rows_to_plan for job in self._jobs.running)

    def _generations(self) -> list[GenerateProgress]:
        return [job for job in self._jobs.running if isinstance(job, GenerateProgress)]

    def _make_room(self, needer: GenerateProgress) -> None:
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
