"""What a step's result brings to its jobs: their events, and what their tenants pay for it."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.jobs.decoding_progress import DecodingProgress
from stemserve.service.batching.jobs.job_progress import JobProgress, KvByRow
from stemserve.service.batching.queue.admission import Admission
from stemserve.service.batching.queue.job_table import JobTable
from stemserve.service.batching.steps.step_builder import IssuedStep
from stemserve.service.batching.steps.step_outputs import StepOutputs
from stemserve.service.request import Event, GenerateChunk, JobFailed


class Answers:
    def __init__(self, jobs: JobTable, admission: Admission, *, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._admission = admission
        self._clock = clock
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events

    def deliver(
        self,
        issued: IssuedStep,
        outputs: StepOutputs,
        groups: Sequence[worker_pb2.GroupReport],
    ) -> None:
        now, kv = self._clock(), KvByRow.of(issued, groups)
        generated: Counter[str] = Counter()
        for arrival, share in issued.shares.items():
            job = self._jobs.by_arrival(arrival)
            if job is None or job.has_ended:
                continue
            job.add_kv(share, kv)
            generated[job.tenant] += self._take(job, job.deliver(outputs), now)
        self._charge(generated, now)

    def collect(self, arrivals: Iterable[int]) -> None:
        """Masks of these jobs are there."""
        now, generated = self._clock(), Counter[str]()
        for arrival in arrivals:
            job = self._jobs.by_arrival(arrival)
            if isinstance(job, DecodingProgress) and not job.has_ended:
                generated[job.tenant] += self._take(job, job.collect(), now)
        self._charge(generated, now)

    def _take(self, job: JobProgress, events: Sequence[Event], now: float) -> int:
        """Returns how many tokens were generated with them."""
        generated = 0
        for event in events:
            self._events.append(event)
            if isinstance(event, GenerateChunk):
                generated += event.num_tokens + event.searched_tokens
        if any(isinstance(event, JobFailed) for event in events):
            self._jobs.end(job)
        else:
            self.finish(job, now)
        return generated

    def finish(self, job: JobProgress, now: float) -> None:
        """End the job if all its results are in."""
        last = job.finish(now)
        if last is None:
            return
        if isinstance(last, GenerateChunk) and self._events:
            newest = self._events[-1]
            if isinstance(newest, GenerateChunk) and newest.request_id == last.request_id:
                last = last._replace(news=newest.news)
                del self._events[-1]
        self._events.append(last)
        self._jobs.end(job)

    def fail(self, job: JobProgress, error: Exception) -> None:
        self._events.append(JobFailed(request_id=job.request_id, error=error))
        self._jobs.end(job)

    def expire(self, late: Iterable[JobProgress], now: float) -> None:
        for job in late:
            self._events.append(job.expire(now))
            self._jobs.end(job)

    def _charge(self, generated: Counter[str], now: float) -> None:
        """For what is generated, which no prompt's length tells."""
        for tenant, tokens in generated.items():
            self._jobs.waiting.charge(tenant, tokens)
            self._admission.charge(tenant, tokens, now)
