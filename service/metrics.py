"""Every Prometheus instrument of the front end."""

from collections.abc import Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.access_config import UNNAMED
from stemserve.service.caller import current_caller
from stemserve.service.errors import RequestError
from stemserve.service.metric_labels import (
    AUTH_FAILURES,
    CODES,
    COMPILE,
    CONSTRAINTS,
    COUNT,
    FALLBACK,
    INFO_METHODS,
    ITEM,
    METHODS,
    OP_PATHS,
    PRIORITIES,
    QUEUE,
    REASONS,
    REJECTIONS,
    RPC,
    SCORE_MODES,
    STEP,
    TPOT,
    TTFT,
    UNSUPPORTED,
)
from stemserve.service.request import JobTiming, JobUsage, Load, WorkerFacts


class Metrics:
    """One update a request or step, never one an item. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry, tenants: Sequence[str] = ()) -> None:
        """`tenants` are those that the configuration names; all other callers count together."""
        self._registry = registry
        self._tenants = (*tenants, UNNAMED)
        self._make_request_instruments()
        self._make_token_instruments()
        self._make_step_instruments()
        self._make_state_instruments()

    def finished(self, method: str, code: str, seconds: float) -> None:
        self._requests.labels(method, code, self._tenant).inc()
        self._duration.labels(method).observe(seconds)

    def rejected(self, error: RequestError) -> None:
        if reason := REJECTIONS.get(type(error)):
            self._rejected.labels(reason, self._tenant).inc()

    def unauthenticated(self, reason: str) -> None:
        self._auth_failures.labels(reason).inc()
        self._rejected.labels("unauthenticated", UNNAMED).inc()

    @property
    def _tenant(self) -> str:
        """Of the RPC that runs in this task."""
        return current_caller().tenant or UNNAMED

    def cancelled(self, phase: str, *, by_deadline: bool) -> None:
        self._cancelled.labels(phase, "deadline" if by_deadline else "client").inc()

    def queued(self, method: str, priority: int, timing: JobTiming) -> None:
        name = PRIORITIES[1 + (priority > 0) - (priority < 0)]
        self._queue.labels(method, name).observe(timing.queue_s)

    def scored(self, mode: str, items: int, timing: JobTiming) -> None:
        self._score_request_items.observe(items)
        self._score_items.inc(items)
        if items:
            self._score_item.labels(mode).observe(timing.engine_s / items)

    def first_token(self, usage: JobUsage, prompt_tokens: int, seconds: float) -> None:
        cached = usage.cached_tokens
        hit = "hit" if cached >= prompt_tokens - 1 else "partial"
        self._ttft.labels(hit if cached else "miss").observe(seconds)

    def streamed(self, gaps: Sequence[tuple[float, int]]) -> None:
        """Seconds between messages with tokens of one request, and the steps of the later one."""
        for seconds, steps in gaps:
            self._inter_token.observe(seconds / steps)
        if gaps:
            steps = sum(steps for _, steps in gaps)
            self._tpot.observe(sum(seconds for seconds, _ in gaps) / steps)

    def constraint_looked_up(self, kind: str, *, found: bool) -> None:
        self._constraints.labels(kind, "hit" if found else "miss").inc()

    def constraint_compiled(self, kind: str, outcome: str, seconds: float) -> None:
        self._compile.labels(kind, outcome).observe(seconds)

    def used(self, usage: JobUsage, *, looked_up_tokens: int) -> None:
        self._prompt_tokens.labels("computed").inc(usage.computed_tokens)
        self._prompt_tokens.labels("dedup_in_batch").inc(usage.shared_tokens)
        self._prompt_tokens.labels("hbm").inc(usage.cached_tokens)
        self._output_tokens.inc(usage.output_tokens)
        self._lookup_tokens.inc(looked_up_tokens)
        self._hit_tokens.labels("hbm").inc(usage.cached_tokens)

    def observe_step(self, result: worker_pb2.StepResult, load: Load) -> None:
        rows = dict.fromkeys((group.phase for group in result.groups), 0)
        for group in result.groups:
            rows[group.phase] += group.rows
            self._observe_group(group)
        for phase, count in rows.items():
            self._batch_rows.labels(phase).observe(count)
        if rows:
            phase = next(iter(rows)) if len(rows) == 1 else "mixed"
            self._step.labels(phase).observe(result.step_seconds)
            self._device_busy.labels(phase).inc(result.device_seconds)
            self._device_idle.labels(phase).inc(result.device_idle_seconds)
        if result.memory_shortages:
            self._shortages.inc(result.memory_shortages)
        self.observe_load(load)

    def observe_load(self, load: Load) -> None:
        for name, waiting in zip(PRIORITIES, load.queued_by_priority, strict=True):
            self._waiting.labels(name).set(waiting)
        self._running.set(load.running_requests)
        self._waiting_tokens.set(load.queued_tokens)
        self._kv_blocks.labels("free").set(load.free_pages)
        self._kv_blocks.labels("cached").set(load.cached_pages)
        self._kv_blocks.labels("used").set(load.used_pages)
        pages = load.free_pages + load.cached_pages + load.used_pages
        self._kv_utilization.set(load.used_pages / pages if pages else 0)

    def describe(self, facts: WorkerFacts, version: str) -> None:
        blocks = (str(facts.page_size), str(facts.kv_pages))
        self._cache_config.labels(*blocks, facts.kv_dtype).set(1)
        self._build.labels(version, "", "", "").set(1)
        self._model.labels(facts.model, "", facts.dtype, "1").set(1)

    def worker_up(self, up: bool) -> None:
        self._worker_up.labels("0").set(up)

    def worker_restarted(self, reason: str) -> None:
        self._worker_restarts.labels(reason).inc()

    def ready(self, ready: bool) -> None:
        self._ready.set(ready)

    def _observe_group(self, group: worker_pb2.GroupReport) -> None:
        path = inference_pb2.Kernel.Name(group.kernel).removeprefix("KERNEL_").lower()
        choice = (group.phase, path)
        self._selected.labels(*choice, group.reason).inc()
        if group.reason == FALLBACK:
            self._fallbacks.labels(*choice, UNSUPPORTED).inc()
        self._kv_read.labels(*choice).inc(group.kv_read_bytes)
        self._kv_avoided.labels(*choice).inc(group.kv_avoided_bytes)
        if group.actual_seconds > 0:
            self._predicted.labels(*choice).inc(group.predicted_seconds)
            self._actual.labels(*choice).inc(group.actual_seconds)

    def _make_request_instruments(self) -> None:
        methods = (*METHODS, *INFO_METHODS)
        self._requests = self._counter(
            "requests", "RPCs finished", method=methods, code=CODES, tenant=self._tenants
        )
        self._duration = self._histogram(
            "request_duration_seconds", "admission to last byte", RPC, method=methods
        )
        self._queue = self._histogram(
            "request_queue_seconds",
            "admission to first schedule",
            QUEUE,
            method=("score", "generate"),
            priority=PRIORITIES,
        )
        self._waiting = self._gauge("requests_waiting", "queued requests", priority=PRIORITIES)
        self._running = self._gauge("requests_running", "scheduled requests")
        self._waiting_tokens = self._gauge("waiting_tokens", "queued tokens to compute")
        self._rejected = self._counter(
            "admission_rejected",
            "rejected before scheduling",
            reason=tuple(dict.fromkeys(REJECTIONS.values())),
            tenant=self._tenants,
        )
        self._auth_failures = self._counter(
            "auth_failures", "calls without a valid credential", reason=AUTH_FAILURES
        )
        self._cancelled = self._counter(
            "requests_cancelled",
            "cancelled; queued is before the engine took the job",
            phase=("queued", "prefill", "decode"),
            cause=("client", "deadline"),
        )

    def _make_token_instruments(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "TTFT", TTFT, prefix=("hit", "partial", "miss")
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "mean of a request's inter-token times", TPOT
        )
        self._inter_token = self._histogram(
            "inter_token_seconds", "time from token to token, averaged over each message", TPOT
        )
        self._score_item = self._histogram(
            "score_item_seconds", "engine time of a request over its items", ITEM, path=SCORE_MODES
        )
        self._score_request_items = self._histogram("score_request_items", "items per call", COUNT)
        self._score_items = self._counter("score_items", "items scored")
        self._prompt_tokens = self._counter(
            "prompt_tokens",
            "prompt tokens by how they were satisfied",
            source=("computed", "dedup_in_batch", "hbm"),
        )
        self._output_tokens = self._counter("output_tokens", "generated tokens")
        self._lookup_tokens = self._counter(
            "prefix_lookup_tokens", "context and prompt tokens looked up in the prefix cache"
        )
        self._hit_tokens = self._counter("prefix_hit_tokens", "of them found", tier=("hbm",))

    def _make_step_instruments(self) -> None:
        self._constraints = self._counter(
            "constraints", "looked up in the cache", kind=CONSTRAINTS, cache=("hit", "miss")
        )
        self._compile = self._histogram(
            "constraint_compile_seconds",
            "to compile a constraint, in its thread",
            COMPILE,
            kind=CONSTRAINTS,
            outcome=("compiled", "refused"),
        )
        self._selected = self._choice_counter(
            "kernel_selected", "kernel path choices", reason=REASONS
        )
        self._fallbacks = self._choice_counter(
            "kernel_fallbacks", "choices that another path had to take", reason=(UNSUPPORTED,)
        )
        self._kv_read = self._choice_counter("attention_kv_read_bytes", "modelled KV bytes read")
        self._kv_avoided = self._choice_counter(
            "attention_kv_avoided_bytes", "modelled KV bytes that one read a request would add"
        )
        self._predicted = self._choice_counter(
            "kernel_predicted_seconds", "predicted attention time of timed steps"
        )
        self._actual = self._choice_counter(
            "kernel_actual_seconds", "measured attention time of the same steps"
        )
        self._step = self._histogram(
            "step_seconds", "engine step", STEP, phase=("prefill", "decode", "mixed")
        )
        self._shortages = self._counter(
            "step_memory_shortages", "times that a step, or a part of it, found no memory"
        )
        phases = ("prefill", "decode", "mixed")
        self._device_busy = self._counter(
            "device_busy_seconds", "a GPU's time in steps, from first work to last", phase=phases
        )
        # Before a decode step some request waits for it; before others nobody may have.
        self._device_idle = self._counter(
            "device_idle_seconds", "a GPU's time between the step before and this", phase=phases
        )
        self._batch_rows = self._histogram(
            "batch_rows", "rows per step", COUNT, phase=("prefill", "decode")
        )

    def _make_state_instruments(self) -> None:
        self._kv_blocks = self._gauge("kv_blocks", "KV blocks", state=("free", "used", "cached"))
        self._kv_utilization = self._gauge("kv_utilization_ratio", "used blocks over all blocks")
        self._cache_config = self._info("cache_config_info", "block_size num_gpu_blocks dtype")
        self._build = self._info("build_info", "version commit torch cuda")
        self._model = self._info("model_info", "model revision dtype tp")
        self._worker_up = self._gauge("worker_up", "1 while the worker answers", rank=("0",))
        self._worker_restarts = self._counter("worker_restarts", "restarts", reason=("exit",))
        self._ready = self._gauge("ready", "1 while the server is SERVING")

    def _counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        counter = Counter(f"stemserve_{name}", text, [*labels], registry=self._registry)
        _create(counter, labels)
        return counter

    def _gauge(self, name: str, text: str, **labels: Sequence[str]) -> Gauge:
        gauge = Gauge(f"stemserve_{name}", text, [*labels], registry=self._registry)
        _create(gauge, labels)
        return gauge

    def _info(self, name: str, labels: str) -> Gauge:
        return Gauge(f"stemserve_{name}", "always 1", labels.split(), registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], **labels: Sequence[str]
    ) -> Histogram:
        histogram = Histogram(
            f"stemserve_{name}", text, [*labels], registry=self._registry, buckets=buckets
        )
        _create(histogram, labels)
        return histogram

    def _choice_counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        names = ["op", "path", *labels]
        counter = Counter(f"stemserve_{name}", text, names, registry=self._registry)
        for choice, values in product(OP_PATHS, product(*labels.values())):
            counter.labels(*choice, *values)
        return counter


def _create(instrument: Counter | Gauge | Histogram, labels: Mapping[str, Sequence[str]]) -> None:
    """All combinations, so that rates do not begin with a gap."""
    if labels:
        for values in product(*labels.values()):
            instrument.labels(*values)
