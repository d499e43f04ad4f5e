"""The engine's state machine: jobs in, steps out, results in, answers out.

It is synchronous and deterministic: no thread, no I/O, and the clock is given.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.answers import Answers
from stemserve.service.batching.explain_plan import ExplainedPlan as ExplainedPlan
from stemserve.service.batching.explain_plan import copy_residents, explain_steps
from stemserve.service.batching.job_intake import JobIntake
from stemserve.service.batching.load_of import load_of
from stemserve.service.batching.mask_work import MaskWork, Run, run_here
from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.pins import Pins
from stemserve.service.batching.pages.places import Places
from stemserve.service.batching.pages.sampler_slots import SamplerSlots
from stemserve.service.batching.queue.admission import CACHED_CHARGE, Admission
from stemserve.service.batching.queue.admission import BatcherLimits as BatcherLimits
from stemserve.service.batching.queue.deadlines import Deadlines
from stemserve.service.batching.queue.job_table import JobTable
from stemserve.service.batching.samples.generate_progress import GenerateProgress
from stemserve.service.batching.step_failure import split_step, undo_step
from stemserve.service.batching.step_planner import StepPlanner
from stemserve.service.batching.steps.burst_size import BurstSize
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.batching.steps.prefix_forest import ForestMemory
from stemserve.service.batching.steps.step_budget import StepBudget
from stemserve.service.batching.steps.step_builder import IssuedStep, StepBuilder
from stemserve.service.batching.steps.step_outputs import read_outputs
from stemserve.service.errors import EngineFault, InvalidRequest, NeverFits, RequestError
from stemserve.service.request import Event, GenerateJob, Int32, Job, Load, Realm, WorkerFacts


class Batcher:
    def __init__(
        self,
        facts: WorkerFacts,
        limits: BatcherLimits,
        *,
        clock: Callable[[], float],
        run_aside: Run = run_here,
    ) -> None:
        """`run_aside` is given masks to make that take long (`MaskWork`)."""
        self._facts = facts
        self._limits = limits
        self._clock = clock
        self._run_aside = run_aside
        self._next_arrival = 0
        self._next_step_id = 1
        self._reset()

    def _reset(self) -> None:
        facts = self._facts
        self._cache = KvCache(facts.kv_pages, facts.page_size)
        self._pins = Pins(self._cache)
        self._slots = SamplerSlots(facts.sampler_slots)
        weights = {tenant: share.weight for tenant, share in self._limits.tenants.items()}
        self._jobs = JobTable(weights, short_tokens=self._limits.short_tokens)
        self._issued: deque[IssuedStep] = deque()
        self._deadlines = Deadlines(self._jobs)
        self._masks = MaskWork(self._run_aside)
        burst = BurstSize(facts.max_burst_steps, max_seconds=self._limits.max_burst_s)
        self._budget = StepBudget(self._limits.max_step_tokens)
        self._forests = ForestMemory(facts.page_size)
        self._planner = StepPlanner(self._jobs, self._limits, self._cache, burst)
        self._admission = Admission(
            self._limits, num_pages=facts.kv_pages, num_slots=facts.sampler_slots
        )
        self._answers = Answers(self._jobs, self._admission, clock=self._clock)
        self._intake = JobIntake(
            self._limits,
            places=Places(
                cache=self._cache,
                pins=self._pins,
                slots=self._slots,
                vocab_size=facts.vocab_size,
            ),
            admission=self._admission,
            jobs=self._jobs,
            masks=self._masks,
            rows_in_flight=lambda: sum(step.num_rows * step.repeat for step in self._issued),
        )

    @property
    def num_in_flight(self) -> int:
        """Steps that are issued and not answered."""
        return len(self._issued)

    @property
    def has_work(self) -> bool:
        """There may be rows to plan."""
        return self._planner.may_find_rows

    @property
    def may_gather(self) -> bool:
        """All that is to be planned fits a step, which others may join, and nothing decodes."""
        return not self._jobs.num_decoding and self._jobs.pending_tokens() <= self._budget.rows

    def submit(self, job: Job) -> None:
        """Raises QueueFull, NeverFits, DeadlinePassed or InvalidRequest."""
        if self._jobs.find(job.request_id) is not None:
            raise InvalidRequest("request_id", f"{job.request_id!r} names a request that runs")
        progress = self._intake.take(job, arrival=self._next_arrival, now=self._clock())
        self._next_arrival += 1
        self._jobs.add(progress)
        self._deadlines.note(progress)

    def cancel(self, request_id: str) -> None:
        """The job is dropped without an event. One that has ended may be cancelled."""
        job = self._jobs.find(request_id)
        if job is not None:
            self._jobs.end(job)

    def stop_sample(self, request_id: str, sample: int) -> None:
        job = self._jobs.find(request_id)
        if isinstance(job, GenerateProgress):
            job.stop_sample(sample)
            self._answers.finish(job, self._clock())

    def plan_step(self) -> worker_pb2.StepPlan | None:
        """None: nothing can be scheduled now. Events may have come up: `take_events`."""
        now = self._clock()
        self._answers.expire(self._deadlines.passed(now), now)
        self._answers.collect(self._masks.take_done())
        built = self._build_step()
        if built is None:
            self._finish_idle(now)
            return None
        plan, issued = built
        self._next_step_id += 1
        self._issued.append(issued)
        for job in map(self._jobs.by_arrival, issued.shares):
            if job is not None:
                job.in_flight += 1
                job.started_s = now if job.started_s is None else job.started_s
        self._finish_idle(now)
        return plan

    def apply(self, result: worker_pb2.StepResult) -> list[Event]:
        """Take the result of the oldest step in flight; returns all events since the last call."""
        issued = self._issued.popleft()
        if issued.step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id}, expected {issued.step_id}")
        try:
            outputs = read_outputs(issued, result, len(self._facts.class_labels))
        except EngineFault as fault:
            self._fail_step(issued, fault)
        else:
            self._budget.observe(issued.num_rows, result.memory_shortages)
            self._learn_speed(issued, result.step_seconds)
            if result.starved_rows:
                self._fail_starved(issued, unpack_int32(result.starved_rows))
            self._answers.deliver(issued, outputs, result.groups)
        for job in map(self._jobs.by_arrival, issued.shares):
            if job is not None:
                self._jobs.end_in_flight(job)
        self._masks.send()
        self._answers.collect(self._masks.take_done())
        return self.take_events()

    def expire(self) -> list[Event]:
        """End the jobs whose deadline has passed; returns all events since the last call."""
        now = self._clock()
        self._answers.expire(self._deadlines.passed(now), now)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Events that came up outside of `apply`: late jobs, and jobs that ended without a step."""
        return self._answers.take()

    def fail_all(self, error: Exception) -> list[Event]:
        """The worker is lost: every job fails, and nothing is cached any more."""
        for job in self._jobs.live():
            self._answers.fail(job, error)
        events = self.take_events()
        self._reset()
        return events

    def explain(self, job: Job) -> Iterator[ExplainedPlan]:
        """Raises as `submit`; changes nothing. The steps are planned as they are taken, by any
        thread: they share nothing with this batcher."""
        alone = Batcher(self._facts, self._limits, clock=self._clock)
        cached = copy_residents(job, self._cache, alone._cache)
        if isinstance(job, GenerateJob):
            job = replace(job, constraint=None)  # it changes what is drawn, not what is planned
        alone.submit(replace(job, deadline=None))
        return explain_steps(
            job,
            alone,
            cached,
            page_size=self._facts.page_size,
            num_classes=len(self._facts.class_labels),
        )

    def check_rates(self, tenant: str, least_tokens: int) -> None:
        """Raises QuotaExceeded for a call of a tenant that would be refused with QuotaExceeded, if
        it has so many tokens, even if all of them are cached."""
        self._admission.check_rates(tenant, least_tokens * CACHED_CHARGE, self._clock())

    def load(self) -> Load:
        return load_of(
            self._jobs,
            self._cache,
            self._pins,
            steps_in_flight=len(self._issued),
            planner=self._planner,
            now=self._clock(),
        )

    def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        return self._cache.resident_tokens(tokens, realm)

    def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        """Keep what is computed of a sequence in the cache; returns how many tokens that are.

        Raises QuotaExceeded. The pin ends with `unpin`, or with the worker.
        """
        largest = max((job.pages for job in self._jobs.live()), default=0)
        return self._pins.pin(key, tokens, realm, largest_job=largest)

    def unpin(self, key: str) -> None:
        self._pins.unpin(key)

    def clear_cache(self) -> int:
        """Free what is cached and neither in use nor pinned; returns how many pages."""
        return self._cache.clear()

    def check_idle(self) -> None:
        """Raises RuntimeError unless all jobs are gone and every page is free or cached."""
        if len(self._jobs) or self._issued:
            raise RuntimeError(f"{len(self._jobs)} jobs and {len(self._issued)} steps are left")
        if self._slots.num_free != self._facts.sampler_slots:
            raise RuntimeError(f"only {self._slots.num_free} sampler slots are free")
        self._cache.check_idle(self._pins.counts)

    def _build_step(self) -> tuple[worker_pb2.StepPlan, IssuedStep] | None:
        if not self._planner.may_find_rows:
            return None
        self._planner.suspend_yielding()
        # Each turn but the last suspends a generation, so that the others find pages.
        for _ in range(len(self._jobs.running) + 1):
            step = StepBuilder(
                self._next_step_id,
                page_size=self._facts.page_size,
                max_rows=self._budget.of_step(self._jobs.pending_tokens),
                most_rows=self._limits.max_step_tokens,
                forests=self._forests,
            )
            self._planner.plan(step)
            built = step.finish(self._cache.tree.release)
            if built is not None:
                return built
            self._recheck()
            if not self._planner.suspend_yielding():
                return None
        return None

    def _finish_idle(self, now: float) -> None:
        for job in list(self._jobs.running):
            if not job.in_flight:
                self._answers.finish(job, now)

    def _learn_speed(self, issued: IssuedStep, seconds: float) -> None:
        if 2 * issued.decode_rows <= issued.num_rows:
            self._admission.observe(issued.num_rows, seconds)
        self._planner.learn(issued, seconds, self._clock())

    def _fail_step(self, issued: IssuedStep, fault: EngineFault) -> None:
        self._fail_all_of(undo_step(issued, self._issued, self._jobs.by_arrival), fault)

    def _fail_starved(self, issued: IssuedStep, rows: Int32) -> None:
        """There was no memory for some rows alone; those that build on them fail too."""
        lost, rest = split_step(issued, issued.jobs_of(rows))
        doomed = undo_step(lost, [rest, *self._issued], self._jobs.by_arrival)
        error = NeverFits(
            f"the worker has no memory for {len(rows)} rows of the step that cannot be divided: "
            "shorten the items, or start a worker with a smaller KV cache"
        )
        self._fail_all_of(doomed, error)

    def _fail_all_of(self, arrivals: Iterable[int], error: RequestError) -> None:
        for arrival in arrivals:
            job = self._jobs.by_arrival(arrival)
            if job is not None and not job.has_ended:
                self._answers.fail(job, error)
        self._recheck()

    def _recheck(self) -> None:
        for job in self._jobs.running:
            job.recheck()
