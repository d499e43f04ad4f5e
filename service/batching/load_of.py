"""What the gauges and GetLoad say of an engine."""

from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.pins import Pins
from stemserve.service.batching.queue.job_table import JobTable
from stemserve.service.batching.step_planner import StepPlanner
from stemserve.service.request import Load


def load_of(
    jobs: JobTable,
    cache: KvCache,
    pins: Pins,
    *,
    steps_in_flight: int,
    planner: StepPlanner,
    now: float,
) -> Load:
    oldest = jobs.waiting.oldest
    free, cached = cache.allocator.num_free, cache.tree.num_unreferenced
    return Load(
        queued_requests=len(jobs.waiting),
        queued_by_priority=jobs.waiting.requests_by_priority,
        running_requests=len(jobs.running),
        queued_tokens=jobs.waiting.num_tokens,
        free_pages=free,
        cached_pages=cached,
        used_pages=cache.allocator.num_pages - free - cached,
        oldest_queued_s=0.0 if oldest is None else now - oldest.submitted_s,
        pinned_pages=pins.pages,
        steps_in_flight=steps_in_flight,
        evicted_pages=cache.evicted_pages,
        cleared_pages=cache.cleared_pages,
        suspensions=planner.suspensions,
        draft_steps=planner.draft_steps,
    )
