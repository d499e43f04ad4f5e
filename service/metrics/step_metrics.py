"""Metrics of the engine: its steps, its choices of kernels, its cache and its load."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.metrics.instruments import Instruments
from stemserve.service.metrics.labels import (
    COUNT,
    FALLBACK,
    FALLBACKS,
    GRAPH_FALLBACKS,
    GRAPH_PATHS,
    PHASES,
    PRIORITIES,
    RATIO,
    REASONS,
    ROWS,
    SHARE,
    STEP,
)
from stemserve.service.request import Load


class StepMetrics:
    """One update a step, never one a row. Safe from any thread."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        make = Instruments(registry)
        self._clock = clock
        self._counted = (0, 0, 0, 0)  # of the worker's counts
        self._awaited_since: float | None = None  # None: nothing is to be done
        self._make_step_instruments(make)
        self._make_kernel_instruments(make)
        self._make_probe_instruments(make)
        self._make_queue_instruments(make)
        self._make_cache_instruments(make)

    def observe_step(self, result: worker_pb2.StepResult, load: Load) -> None:
        self._awaited_since = None
        self._observe_phases(result)
        for fallback in result.fallbacks:
            self._graph_fallbacks.labels(fallback.path, fallback.reason).inc(fallback.count)
        for probe in result.probes:
            self._observe_probe(probe)
        if result.memory_shortages:
            self._shortages.inc(result.memory_shortages)
        self.observe_load(load)

    def observe_load(self, load: Load) -> None:
        for name, waiting in zip(PRIORITIES, load.queued_by_priority, strict=True):
            self._waiting.labels(name).set(waiting)
        self._waiting_all.set(load.queued_requests)
        self._running.set(load.running_requests)
        self._waiting_tokens.set(load.queued_tokens)
        self._oldest.set(load.oldest_queued_s)
        self._kv_blocks.labels("free").set(load.free_pages)
        self._kv_blocks.labels("cached").set(load.cached_pages)
        self._kv_blocks.labels("used").set(load.used_pages - load.pinned_pages)
        self._kv_blocks.labels("pinned").set(load.pinned_pages)
        pages = load.free_pages + load.cached_pages + load.used_pages
        self._kv_utilization.set(load.used_pages / pages if pages else 0)
        self._count_load(load)
        if not (load.steps_in_flight or load.queued_requests):
            self._awaited_since = None
        elif self._awaited_since is None:
            self._awaited_since = self._clock()

    def _count_load(self, load: Load) -> None:
        counts = (
            load.evicted_pages,
            load.cleared_pages,
            load.suspensions,
            load.draft_steps,
        )
        if any(now < before for now, before in zip(counts, self._counted, strict=True)):
            self._counted = (0, 0, 0, 0)  # of a new worker
        counters = (
            self._evictions.labels("hbm", "capacity"),
            self._evictions.labels("hbm", "cleared"),
            self._preemptions,
            self._draft_steps,
        )
        for counter, now, before in zip(counters, counts, self._counted, strict=True):
            counter.inc(now - before)
        self._counted = counts

    def _stall_s(self) -> float:
        since = self._awaited_since
        return 0.0 if since is None else self._clock() - since

    def _observe_phases(self, result: worker_pb2.StepResult) -> None:
        rows = dict.fromkeys((group.phase for group in result.groups), 0)
        for group in result.groups:
            rows[group.phase] += group.rows
            self._observe_group(group)
        if not rows:
            return
        for phase, count in rows.items():
            groups = [group for group in result.groups if group.phase == phase]
            read = sum(group.kv_read_bytes for group in groups)
            avoided = sum(group.kv_avoided_bytes for group in groups)
            self._batch_rows.labels(phase).observe(count)
            self._batch_segments.labels(phase).observe(sum(group.segments for group in groups))
            if read + avoided:
                self._shared.labels(phase).observe(avoided / (read + avoided))
        phase = next(iter(rows)) if len(rows) == 1 else "mixed"
        self._step.labels(phase).observe(result.step_seconds)
        self._trees.labels(phase).observe(result.trees)
        self._device_busy.labels(phase).inc(result.device_seconds)
        self._device_idle.labels(phase).inc(result.device_idle_seconds)

    def _observe_probe(self, probe: worker_pb2.Probe) -> None:
        chosen, other = probe.chosen_seconds, probe.runner_up_seconds
        winner = probe.chosen if chosen <= other else probe.runner_up
        self._probes.labels(probe.phase, _path(winner)).inc()
        self._probed.labels(probe.phase).inc(chosen)
        self._regret.labels(probe.phase).inc(max(0.0, chosen - other))
        if other > 0:
            self._probe_ratio.labels(probe.phase).observe(chosen / other)

    def _observe_group(self, group: worker_pb2.GroupReport) -> None:
        choice = (group.phase, _path(group.kernel))
        self._selected.labels(*choice, group.reason).inc()
        if group.reason == FALLBACK:
            why = group.fallback if group.fallback in FALLBACKS else FALLBACKS[0]
            self._fallbacks.labels(*choice, why).inc()
        self._kv_read.labels(*choice).inc(group.kv_read_bytes)
        self._kv_avoided.labels(*choice).inc(group.kv_avoided_bytes)
        if group.actual_seconds > 0:
            self._predicted.labels(*choice).inc(group.predicted_seconds)
            self._actual.labels(*choice).inc(group.actual_seconds)
            self._seconds.labels(*choice).observe(group.actual_seconds)
            if group.predicted_seconds > 0:
                ratio = group.actual_seconds / group.predicted_seconds
                self._ratio.labels(*choice).observe(ratio)

    def _make_step_instruments(self, make: Instruments) -> None:
        self._step = make.histogram(
            "step_seconds", "Time of an engine step, or of a burst of steps", STEP, phase=PHASES
        )
        self._batch_rows = make.histogram(
            "batch_rows", "Tokens that go through the model in a step", ROWS, phase=PHASES[:2]
        )
        self._batch_segments = make.histogram(
            "batch_segments",
            "Sequences and items, or parts of them, in a step",
            COUNT,
            phase=PHASES[:2],
        )
        self._trees = make.histogram(
            "batch_prefix_groups",
            "Trees of a step's prefix forest: what is in different ones shares nothing",
            COUNT,
            phase=PHASES,
        )
        self._shared = make.histogram(
            "batch_shared_ratio",
            "KV bytes avoided in a step, over those read and avoided (modelled)",
            SHARE,
            phase=PHASES[:2],
        )
        self._shortages = make.counter(
            "step_memory_shortages", "Times that a step, or a part of it, found no memory"
        )
        self._draft_steps = make.counter(
            "draft_steps",
            "Decode steps that verified drafts; such a step is in no burst",
        )
        self._device_busy = make.counter(
            "device_busy_seconds", "A GPU's time in steps, from first work to last", phase=PHASES
        )
        # Before a decode step some request waits for it; before others nobody may have.
        self._device_idle = make.counter(
            "device_idle_seconds", "A GPU's time between the step before and this", phase=PHASES
        )

    def _make_kernel_instruments(self, make: Instruments) -> None:
        self._selected = make.choice_counter(
            "kernel_selected", "Attention groups by the path that ran them, and why", reason=REASONS
        )
        self._fallbacks = make.choice_counter(
            "kernel_fallbacks",
            "Attention groups that this path had to take, by what kept them from another",
            reason=FALLBACKS,
        )
        self._graph_fallbacks = make.counter(
            "graph_fallbacks",
            "Steps launched kernel by kernel though captured CUDA graphs are there for their like",
            path=GRAPH_PATHS,
            reason=GRAPH_FALLBACKS,
        )
        self._kv_read = make.choice_counter(
            "attention_kv_read_bytes", "KV bytes that attention loads (modelled)"
        )
        self._kv_avoided = make.choice_counter(
            "attention_kv_avoided_bytes",
            "KV bytes that one read for each sequence and item would add (modelled)",
        )
        self._seconds = make.choice_histogram(
            "kernel_seconds", "Measured attention time of a group, all layers, of timed steps", STEP
        )
        self._predicted = make.choice_counter(
            "kernel_predicted_seconds", "Predicted attention time of timed steps"
        )
        self._actual = make.choice_counter(
            "kernel_actual_seconds", "Measured attention time of the same steps"
        )
        self._ratio = make.choice_histogram(
            "kernel_prediction_ratio", "Measured over predicted attention time of a group", RATIO
        )

    def _make_probe_instruments(self, make: Instruments) -> None:
        self._probes = make.choice_counter(
            "kernel_probes",
            "Attention groups run once more beside the next best path, by the faster one",
        )
        self._probed = make.counter(
            "kernel_probed_seconds", "Attention time of the chosen paths in probes", op=PHASES[:2]
        )
        self._regret = make.counter(
            "kernel_regret_seconds",
            "Of it what the next best path would have saved where it was faster",
            op=PHASES[:2],
        )
        self._probe_ratio = make.histogram(
            "kernel_probe_ratio",
            "Attention time of the chosen path over that of the next best, of a probe",
            RATIO,
            op=PHASES[:2],
        )

    def _make_queue_instruments(self, make: Instruments) -> None:
        self._waiting = make.gauge("requests_waiting", "Queued requests", priority=PRIORITIES)
        self._waiting_all = make.gauge("requests_waiting_all", "Queued requests of all priorities")
        self._running = make.gauge("requests_running", "Scheduled requests")
        self._waiting_tokens = make.gauge(
            "waiting_tokens", "Tokens of queued requests that must be computed"
        )
        self._oldest = make.gauge(
            "queue_oldest_seconds", "How long the oldest queued request has been waiting"
        )
        make.computed_gauge(
            "engine_stall_seconds",
            "Time since the last step ended while work is queued or in flight",
            self._stall_s,
        )
        self._preemptions = make.counter(
            "kv_preemptions", "Generations whose pages were taken; they are computed again later"
        )

    def _make_cache_instruments(self, make: Instruments) -> None:
        self._kv_blocks = make.gauge(
            "kv_blocks",
            "KV pages: used by running requests, pinned for prefixes, cached (evictable) or free",
            state=("free", "used", "cached", "pinned"),
        )
        self._kv_utilization = make.gauge(
            "kv_utilization_ratio", "Pages used and pinned over all pages"
        )
        self._evictions = make.counter(
            "prefix_evictions",
            "Cached pages given up to make room, or cleared by Admin.ClearCache",
            tier=("hbm",),
            reason=("capacity", "cleared"),
        )


def _path(kernel: inference_pb2.Kernel.ValueType) -> str:
    return inference_pb2.Kernel.Name(kernel).removeprefix("KERNEL_").lower()
