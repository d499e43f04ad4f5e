"""Metrics of calls and of the server; those of the engine are in step_metrics."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from stemserve.service.affinity import MOVED, OUTCOMES, AffinityLog
from stemserve.service.call_facts import current_call
from stemserve.service.caller import current_caller
from stemserve.service.config.access import UNNAMED
from stemserve.service.errors import PrefixNotFound, RequestError
from stemserve.service.metrics.constraint_metrics import ConstraintMetrics
from stemserve.service.metrics.instruments import Instruments
from stemserve.service.metrics.labels import (
    AUTH_FAILURES,
    CODES,
    COUNT,
    INFO_METHODS,
    ITEM,
    METHODS,
    PRIORITIES,
    QUEUE,
    REJECTIONS,
    RPC,
    SCORE_MODES,
    SPANS,
    TPOT,
    TRIE_METHODS,
    TTFT,
    cached_part,
)
from stemserve.service.metrics.step_metrics import StepMetrics
from stemserve.service.request import JobTiming, JobUsage, WorkerFacts
from stemserve.service.stream_pace import StreamPace

INFERENCE = "stemserve.v1.Inference/"


class Metrics:
    """One update a request or step, never one an item. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry, tenants: Sequence[str] = ()) -> None:
        """`tenants` are those that the configuration names; all other callers count together."""
        make = Instruments(registry)
        self._tenants = (*tenants, UNNAMED)
        self._affinity_log = AffinityLog()
        self._make_request_instruments(make)
        self._make_latency_instruments(make)
        self._make_token_instruments(make)
        constraints = ConstraintMetrics(make)
        self.constraint_looked_up = constraints.looked_up
        self.constraint_compiled = constraints.compiled
        self.masks_made = constraints.masks_made
        steps = StepMetrics(registry)
        self.observe_step = steps.observe_step
        self.observe_load = steps.observe_load
        self._make_state_instruments(make)

    def finished(self, method: str, code: str, seconds: float) -> None:
        self._requests.labels(method, code, self._tenant).inc()
        self._duration.labels(method).observe(seconds, current_call().exemplar)

    def rejected(self, error: RequestError) -> None:
        is_inference = current_call().method.startswith(INFERENCE)
        if isinstance(error, PrefixNotFound) and is_inference:
            self._affinity.labels(MOVED).inc()
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
        self._queue.labels(method, name).observe(timing.queue_s, current_call().exemplar)

    def scored(self, mode: str, items: int, timing: JobTiming) -> None:
        self._score_request_items.observe(items)
        self._score_items.inc(items)
        if items:
            seconds = timing.engine_s / items
            self._score_item.labels(mode).observe(seconds, current_call().exemplar)

    def first_token(self, usage: JobUsage, prompt_tokens: int, seconds: float) -> None:
        outcome = cached_part(usage.cached_tokens, prompt_tokens)
        prefix = "hit" if outcome == "full" else outcome
        self._ttft.labels(prefix).observe(seconds, current_call().exemplar)

    def streamed(self, gaps: Sequence[tuple[float, int]]) -> None:
        """Seconds between messages with tokens of one request, and the steps of the later one."""
        for seconds, steps in gaps:
            self._inter_token.observe(seconds / steps)
        if gaps:
            steps = sum(steps for _, steps in gaps)
            self._tpot.observe(sum(seconds for seconds, _ in gaps) / steps)

    def message_sent(self, pace: StreamPace) -> None:
        """Of the stream that goes by it; counts what it has joined since the last."""
        self._messages.inc()
        self._joined_by_pace.inc(pace.joined_by_pace)
        self._joined_behind.inc(pace.joined_behind)
        pace.joined_by_pace = pace.joined_behind = 0

    def used(self, usage: JobUsage, *, looked_up_tokens: int) -> None:
        self._prompt_tokens.labels("computed").inc(usage.computed_tokens)
        self._prompt_tokens.labels("dedup_in_batch").inc(usage.shared_tokens)
        if usage.cached_tokens:
            self._prompt_tokens.labels("hbm").inc(usage.cached_tokens)
            self._hit_tokens.labels("hbm").inc(usage.cached_tokens)
        if usage.output_tokens:
            self._output_tokens.inc(usage.output_tokens)
        if usage.drafted_tokens:
            self._draft_tokens.labels("accepted").inc(usage.accepted_tokens)
            self._draft_tokens.labels("rejected").inc(usage.drafted_tokens - usage.accepted_tokens)
        self._lookup_tokens.inc(looked_up_tokens)
        if looked_up_tokens:
            self._lookups.labels(cached_part(usage.cached_tokens, looked_up_tokens)).inc()
            key, found = current_call().routing_key, usage.cached_tokens > 0
            home = self._affinity_log.outcome(current_caller().tenant, key, found=found)
            self._affinity.labels(home).inc()

    def describe(self, facts: WorkerFacts, version: str) -> None:
        blocks = (str(facts.page_size), str(facts.kv_pages))
        self._cache_config.labels(*blocks, facts.kv_dtype).set(1)
        self._build.labels(version, facts.torch_version, facts.cuda_version).set(1)
        self._model.labels(facts.model, facts.dtype, facts.device).set(1)

    def spans(self, outcome: str, count: int) -> None:
        self._spans.labels(outcome).inc(count)

    def prefixes(self, registered: int) -> None:
        self._prefixes.set(registered)

    def tries(self, registered: int, num_bytes: int) -> None:
        self._tries.set(registered)
        self._trie_bytes.set(num_bytes)

    def worker_up(self, up: bool) -> None:
        self._worker_up.labels("0").set(up)

    def worker_restarted(self, reason: str) -> None:
        self._worker_restarts.labels(reason).inc()

    def model_loaded(self, seconds: float) -> None:
        self._load_seconds.set(seconds)

    def ready(self, ready: bool) -> None:
        self._ready.set(ready)

    def _make_request_instruments(self, make: Instruments) -> None:
        self._requests = make.counter(
            "requests",
            "Calls that ended",
            method=(*METHODS, *TRIE_METHODS, *INFO_METHODS),
            code=CODES,
            tenant=self._tenants,
        )
        self._rejected = make.counter(
            "admission_rejected",
            "Calls refused before they were scheduled",
            reason=tuple(dict.fromkeys(REJECTIONS.values())),
            tenant=self._tenants,
        )
        self.delivery_failed = make.counter(
            "delivery_faults", "Calls ended by a fault in handing the engine's news to them"
        ).inc
        self._auth_failures = make.counter(
            "auth_failures", "Calls without a valid credential", reason=AUTH_FAILURES
        )
        self._cancelled = make.counter(
            "requests_cancelled",
            "Calls given up, by where they were; queued is before the engine took the job",
            phase=("queued", "prefill", "decode"),
            cause=("client", "deadline"),
        )

    def _make_latency_instruments(self, make: Instruments) -> None:
        self._duration = make.histogram(
            "request_duration_seconds",
            "Time of a call, from its arrival to its last byte",
            RPC,
            method=(*METHODS, *TRIE_METHODS, *INFO_METHODS),
        )
        self._queue = make.histogram(
            "request_queue_seconds",
            "From submission to the first planned step",
            QUEUE,
            method=("score", "generate"),
            priority=PRIORITIES,
        )
        self._ttft = make.histogram(
            "time_to_first_token_seconds",
            "To the first token of a generation, by how much of the prompt was cached",
            TTFT,
            prefix=("hit", "partial", "miss"),
        )
        self._tpot = make.histogram(
            "time_per_output_token_seconds", "Mean of a request's inter-token times", TPOT
        )
        self._inter_token = make.histogram(
            "inter_token_seconds", "Time from token to token, averaged over each message", TPOT
        )
        self._score_item = make.histogram(
            "score_item_seconds",
            "Engine time of a Score call over its items; once a call",
            ITEM,
            path=SCORE_MODES,
        )

    def _make_token_instruments(self, make: Instruments) -> None:
        self._score_request_items = make.histogram(
            "score_request_items", "Items of a Score call", COUNT
        )
        self._score_items = make.counter("score_items", "Items scored")
        self._prompt_tokens = make.counter(
            "prompt_tokens",
            "Prompt, context and item tokens: computed, shared within the call, or cached (hbm)",
            source=("computed", "dedup_in_batch", "hbm"),
        )
        self._output_tokens = make.counter("output_tokens", "Generated tokens")
        self._messages = make.counter("stream_messages", "Messages of Generate calls")
        joined = make.counter(
            "stream_messages_joined",
            "Tokens of a step that came in a message with those before: to send fewer messages "
            "(pace), or because the client had not taken the last one (reader)",
            cause=("pace", "reader"),
        )
        self._joined_by_pace, self._joined_behind = joined.labels("pace"), joined.labels("reader")
        self._draft_tokens = make.counter(
            "draft_tokens",
            "Tokens guessed ahead and verified, of generations that are done",
            outcome=("accepted", "rejected"),
        )
        self._lookup_tokens = make.counter(
            "prefix_lookup_tokens", "Context and prompt tokens looked up in the prefix cache"
        )
        self._hit_tokens = make.counter(
            "prefix_hit_tokens", "Of them those that were there", tier=("hbm",)
        )
        self._lookups = make.counter(
            "prefix_lookups",
            "Calls with a context or prompt, by how much of it was cached",
            result=("full", "partial", "miss"),
        )
        self._affinity = make.counter(
            "prefix_affinity",
            "Calls with a context or prompt, by what the one that x-prefix-id names had here",
            outcome=OUTCOMES,
        )

    def _make_state_instruments(self, make: Instruments) -> None:
        self._prefixes = make.gauge("prefixes_registered", "Registered prefixes of all tenants")
        self._tries = make.gauge("tries_registered", "Uploaded tries of all tenants")
        self._trie_bytes = make.gauge("trie_bytes", "Memory of tries and of their uploads")
        self._cache_config = make.info(
            "cache_config_info", "Always 1: the KV cache", "block_size num_gpu_blocks dtype"
        )
        self._build = make.info("build_info", "Always 1: the software", "version torch cuda")
        self._model = make.info("model_info", "Always 1: the model", "model dtype device")
        self._worker_up = make.gauge("worker_up", "1 while the worker answers", rank=("0",))
        self._worker_restarts = make.counter(
            "worker_restarts", "Workers started in place of lost ones", reason=("exit",)
        )
        self._load_seconds = make.gauge(
            "model_load_seconds", "From the launch of the worker until it was ready, the last time"
        )
        self._spans = make.counter(
            "trace_spans", "Spans of traced calls, by what became of them", outcome=SPANS
        )
        self._ready = make.gauge("ready", "1 while the server is SERVING")
