"""What becomes of the spans of ended calls: sent, or dropped and counted."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from opentelemetry.sdk.trace import ReadableSpan
from tests.service.certificates import Authority
from tests.service.otlp_receiver import otlp_receiver, values

from stemserve.service.config.tracing import TracingConfig
from stemserve.service.tracing.call_trace import CallTrace, StepShare, TracedStep
from stemserve.service.tracing.otlp_export import OtlpExport, otlp_export
from stemserve.service.tracing.span_tree import count_spans, spans_of
from stemserve.service.tracing.trace_context import (
    RemoteParent,
    SpanIds,
    new_span_id,
    new_trace_id,
)
from stemserve.service.tracing.tracer import Tracer

EMPTY_PORT = "http://127.0.0.1:9"  # discard: nobody listens


def ended_call(steps: int = 0, *, link: SpanIds | None = None) -> CallTrace:
    now = time.monotonic()
    trace = CallTrace(
        method="stemserve.v1.Inference/Score",
        ids=SpanIds(trace_id=new_trace_id(), span_id=new_span_id()),
        is_remote_parent=False,
        began_s=now,
        epoch_s=time.time() - now,
        max_steps=5,
        link=link,
    )
    if steps:
        trace.submit(now + 1)
    for number in range(steps):
        step = TracedStep(
            step_id=number, plan_began_s=now + 2, plan_ended_s=now + 3, rows=4, repeat=1
        )
        trace.take_step(StepShare(step=step, prefill_rows=4, decode_rows=0))
        if number:  # the first is not answered
            step.worker_seconds = 0.25
            step.answered_s = now + 4
            trace.take_result(step)
    trace.end(now + 5, "OK", "")
    return trace


def export_to(
    endpoint: str, counts: Counter[str], *, max_queued_spans: int = 1000, timeout_s: float = 10.0
) -> OtlpExport:
    config = TracingConfig(
        otlp_endpoint=endpoint, max_queued_spans=max_queued_spans, export_timeout_s=timeout_s
    )

    def note(outcome: str, count: int) -> None:
        counts[outcome] += count

    return otlp_export(config, version="1.2", note=note)


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_as_many_spans_are_made_as_were_counted(steps: int) -> None:
    trace = ended_call(steps)
    assert len(spans_of(trace)) == count_spans(trace)


def test_steps_beyond_the_most_are_counted_only() -> None:
    spans = spans_of(ended_call(9))
    (engine,) = [span for span in spans if span.name == "engine"]
    assert engine.attributes["stemserve.steps"] == 9
    assert engine.attributes["stemserve.steps.worker_seconds"] == 8 * 0.25
    assert [span.name for span in spans].count("step") == 5


def test_a_step_without_a_result_lasts_until_the_call_ends() -> None:
    trace = ended_call(1)
    step = next(span for span in spans_of(trace) if span.name == "step")
    assert step.attributes["stemserve.step.answered"] is False
    assert step.end_ns == spans_of(trace)[0].end_ns


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


def test_what_is_queued_is_sent_before_the_end(counts: Counter[str]) -> None:
    with otlp_receiver() as receiver:
        export = export_to(receiver.endpoint, counts)
        link = SpanIds(trace_id=new_trace_id(), span_id=new_span_id())
        calls = [ended_call(3), ended_call(link=link)]
        for call in calls:
            export.put(call)
        export.close(10.0)
        assert counts == {"exported": sum(map(count_spans, calls))}
        assert len(receiver.requests) == 1  # they went together
        (linked,) = receiver.of_trace(calls[1].ids.trace_id.to_bytes(16))
        assert linked.links[0].span_id == link.span_id.to_bytes(8)
        assert receiver.resource["service.version"] == "1.2"
        said = values(linked.attributes)
        assert said["rpc.response.status_code"] == "OK"


def test_calls_that_do_not_fit_are_dropped_whole_and_counted(counts: Counter[str]) -> None:
    with otlp_receiver() as receiver:
        receiver.open.clear()  # a receiver that does not get on
        export = export_to(receiver.endpoint, counts, max_queued_spans=20)
        calls = [ended_call(3) for _ in range(3)]
        for call in calls:
            export.put(call)
        each = count_spans(calls[0])
        assert counts == {"queue_full": 2 * each}
        receiver.open.set()
        export.close(10.0)
        assert counts == {"queue_full": 2 * each, "exported": each}
        assert len(receiver.spans) == each


def test_spans_that_no_receiver_takes_are_counted(counts: Counter[str]) -> None:
    export = export_to(EMPTY_PORT, counts, timeout_s=0.2)
    export.put(ended_call())
    export.close(30.0)
    assert counts == {"refused": 1}


def test_an_end_does_not_wait_longer_than_it_may_for_a_receiver(counts: Counter[str]) -> None:
    with otlp_receiver() as receiver:
        receiver.open.clear()
        export = export_to(receiver.endpoint, counts, timeout_s=60.0)
        export.put(ended_call())
        began = time.monotonic()
        export.close(0.2)
        assert time.monotonic() - began < 20
        export.put(ended_call())
        assert counts == {"stopped": 2}


def test_a_fault_of_the_exporter_does_not_end_the_thread(counts: Counter[str]) -> None:
    class Faulty:
        def export(self, spans: list[ReadableSpan]) -> None:
            raise RuntimeError("no")

        def shutdown(self) -> None:
            pass

    def note(outcome: str, count: int) -> None:
        counts[outcome] += count

    exporter: Any = Faulty()
    export = OtlpExport(exporter, version="1", max_queued_spans=10, note=note)
    export.put(ended_call())
    export.close(10.0)
    assert counts == {"refused": 1}


def test_a_caller_that_is_not_followed_keeps_its_trace_and_not_its_choice() -> None:
    parent = RemoteParent(trace_id=new_trace_id(), span_id=new_span_id(), is_sampled=True)
    for ratio, expected in ((0.0, False), (1.0, True)):
        config = TracingConfig(sample_ratio=ratio, follow_callers=False)
        trace = Tracer(config, lambda trace: None).begin("m", parent, 0.0)
        assert (trace is not None) is expected
        assert trace is None or trace.ids.trace_id == parent.trace_id


def test_a_receiver_with_tls_is_sent_to_with_the_environments_authority(
    counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("collector", x509.DNSName("localhost"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.certificate))
    with otlp_receiver(identity) as receiver:
        export = export_to(receiver.endpoint, counts)
        export.put(ended_call())
        export.close(10.0)
    assert counts == {"exported": 1}


def test_a_deployment_names_its_service(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ranker")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    with otlp_receiver() as receiver:
        export = export_to(receiver.endpoint, counts)
        export.put(ended_call())
        export.close(10.0)
        assert receiver.resource["service.name"] == "ranker"
        assert receiver.resource["deployment.environment.name"] == "staging"
        assert receiver.resource["service.version"] == "1.2"
