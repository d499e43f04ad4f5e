"""Which jobs are late."""

import heapq
from collections.abc import Iterator

from stemserve.service.batching.jobs.job_progress import JobProgress
from stemserve.service.batching.queue.job_table import JobTable

SPARE_DEADLINES = 64  # of jobs that have ended, kept beside those of live ones


class Deadlines:
    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs
        self._heap: list[tuple[float, int]] = []  # with the arrival number

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, job: JobProgress) -> None:
        """Jobs end long before a late deadline: what has ended is cleared out now and then."""
        if job.deadline is None:
            return
        heapq.heappush(self._heap, (job.deadline, job.arrival))
        if len(self._heap) > 2 * len(self._jobs) + SPARE_DEADLINES:
            by_arrival = self._jobs.by_arrival
            self._heap = [due for due in self._heap if by_arrival(due[1]) is not None]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> Iterator[JobProgress]:
        """Jobs that have not ended, each once."""
        while self._heap and self._heap[0][0] <= now:
            _, arrival = heapq.heappop(self._heap)
            job = self._jobs.by_arrival(arrival)
            if job is not None and not job.has_ended:
                yield job
