"""All jobs of the batcher, by where they stand."""

from bisect import insort
from collections.abc import Mapping

from stemserve.service.batching.jobs.job_progress import JobProgress
from stemserve.service.batching.queue.waiting_queue import WaitingQueue


def _order(job: JobProgress) -> tuple[int, int]:
    return job.order


class JobTable:
    def __init__(self, weights: Mapping[str, float], *, short_tokens: int) -> None:
        """As the waiting queue's."""
        self.waiting: WaitingQueue[JobProgress] = WaitingQueue(weights, short_tokens=short_tokens)
        self.running: list[JobProgress] = []  # in the order of work
        self.ending: set[JobProgress] = set()  # answered or cancelled, with rows in flight
        self.num_decoding = 0  # jobs that have, or will have, decode rows
        self._by_id: dict[str, JobProgress] = {}
        self._by_arrival: dict[int, JobProgress] = {}

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, job: JobProgress) -> None:
        self.waiting.add(job)
        self._by_id[job.request_id] = job
        self._by_arrival[job.arrival] = job
        self.num_decoding += job.decodes

    def find(self, request_id: str) -> JobProgress | None:
        """A job that has not ended."""
        return self._by_id.get(request_id)

    def by_arrival(self, arrival: int) -> JobProgress | None:
        return self._by_arrival.get(arrival)

    def live(self) -> list[JobProgress]:
        return [*self.running, *self.waiting]

    def running_tokens(self, priority: int | None = None) -> int:
        """That are still to be planned for running jobs, of at least a priority if one is given."""
        if not self.running:
            return 0
        return sum(
            max(0, job.cost_tokens - job.planned_rows)
            for job in self.running
            if priority is None or job.priority >= priority
        )

    def pending_tokens(self) -> int:
        """That are still to be planned for all jobs."""
        return self.running_tokens() + self.waiting.num_tokens

    def start(self, job: JobProgress) -> None:
        self.waiting.start(job)
        insort(self.running, job, key=_order)

    def requeue(self, job: JobProgress) -> None:
        self.running.remove(job)
        job.planned_rows = 0
        self.waiting.add(job)

    def end(self, job: JobProgress) -> None:
        """The job has no more to say; it lets go of its pages once no step in flight uses them."""
        if not self.waiting.remove(job):
            self.running.remove(job)
        del self._by_id[job.request_id]
        job.has_ended = True
        self.num_decoding -= job.decodes
        if job.in_flight:
            self.ending.add(job)
        else:
            self._forget(job)

    def end_in_flight(self, job: JobProgress) -> None:
        """A step with rows of the job has been answered."""
        job.in_flight -= 1
        if job.in_flight == 0 and job in self.ending:
            self.ending.remove(job)
            self._forget(job)

    def _forget(self, job: JobProgress) -> None:
        job.release()
        del self._by_arrival[job.arrival]
