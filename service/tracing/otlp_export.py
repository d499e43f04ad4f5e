"""Send the spans of ended calls to an OTLP receiver, on a thread of its own.

Needs the extra `tracing`. The SDK's exporter speaks the protocol and retries; its batch processor
is not used, because it says nothing of the spans that it drops or that no receiver took.
"""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from stemserve.service.config.tracing import TracingConfig
from stemserve.service.tracing.call_trace import CallTrace
from stemserve.service.tracing.span_tree import CallSpan, count_spans, spans_of
from stemserve.service.tracing.trace_context import SpanIds

_log = logging.getLogger(__name__)

BATCH_SPANS = 512  # a message has at least so many, if they come within the delay
DELAY_S = 1.0
ABORT_S = 1.0  # for a message that is cut to come back

NoteSpans = Callable[[str, int], None]  # exported, queue_full, refused or stopped; how many


class OtlpExport:
    """`put` never blocks. What does not fit is dropped, a whole call at once."""

    def __init__(
        self, exporter: SpanExporter, *, version: str, max_queued_spans: int, note: NoteSpans
    ) -> None:
        self._exporter = exporter
        self._max_queued_spans = max_queued_spans
        self._note = note
        self._scope = InstrumentationScope("stemserve", version)
        self._resource = _resource(version)
        self._traces: queue.SimpleQueue[tuple[CallTrace, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_spans = 0
        self._is_closed = False
        self._is_cut = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def put(self, trace: CallTrace) -> None:
        spans = count_spans(trace)
        with self._lock:
            why = "stopped" if self._is_closed else ""
            if not why and self._queued_spans + spans > self._max_queued_spans:
                why = "queue_full"
            if not why:
                self._queued_spans += spans
                self._traces.put((trace, spans))
        if why:
            self._note(why, spans)

    def close(self, timeout_s: float) -> None:
        """Send what is queued; what is not sent by then is dropped."""
        with self._lock:
            self._is_closed = True
            self._traces.put(None)
        self._thread.join(timeout_s)
        self._is_cut = True
        self._exporter.shutdown()  # ends the wait for a receiver
        self._thread.join(ABORT_S)
        with self._lock:
            left, self._queued_spans = self._queued_spans, 0
        if left:
            self._note("stopped", left)

    def _run(self) -> None:
        while (item := self._traces.get()) is not None:
            batch, counted = self.readable(item[0]), item[1]
            until = time.monotonic() + DELAY_S
            while item is not None and len(batch) < BATCH_SPANS:
                try:
                    item = self._traces.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if item is not None:
                    batch += self.readable(item[0])
                    counted += item[1]
            self._send(batch, counted)
            if item is None:
                return

    def _send(self, batch: Sequence[ReadableSpan], counted: int) -> None:
        """`counted`: what `put` took the spans for. A step of a call that was cancelled may have
        been answered since."""
        try:
            is_sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # of a library: the thread goes on
            _log.exception("cannot send %d spans", len(batch))
            is_sent = False
        with self._lock:
            is_counted = not self._queued_spans  # by `close`, which did not wait
            self._queued_spans -= 0 if is_counted else counted
        if not is_counted:
            failed = "stopped" if self._is_cut else "refused"
            self._note("exported" if is_sent else failed, len(batch))

    def readable(self, trace: CallTrace) -> list[ReadableSpan]:
        state = TraceState.from_header([trace.ids.state]) if trace.ids.state else TraceState()
        spans = spans_of(trace)
        return [self._span(trace, span, state, is_call=span is spans[0]) for span in spans]

    def _span(
        self, trace: CallTrace, span: CallSpan, state: TraceState, *, is_call: bool
    ) -> ReadableSpan:
        def context(span_id: int, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(
                trace.ids.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state
            )

        is_remote = is_call and trace.is_remote_parent
        parent = None if span.parent_id is None else context(span.parent_id, is_remote=is_remote)
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            links=[_link(trace.link)] if is_call and trace.link is not None else (),
            kind=SpanKind.SERVER if is_call else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def otlp_export(config: TracingConfig, *, version: str, note: NoteSpans) -> OtlpExport:
    exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=config.export_timeout_s)
    return OtlpExport(
        exporter, version=version, max_queued_spans=config.max_queued_spans, note=note
    )


def _resource(version: str) -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES beat what we say."""
    ours = Resource(
        {
            "service.name": "stemserve",
            "service.version": version,
            "service.instance.id": str(uuid.uuid4()),
        }
    )
    return ours.merge(OTELResourceDetector().detect())


def _link(ids: SpanIds) -> Link:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return Link(SpanContext(ids.trace_id, ids.span_id, is_remote=False, trace_flags=flags))
