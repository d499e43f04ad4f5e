"""CPU time of following calls: on the RPC loop for each call, and in the exporter for each span.

PYTHONPATH=benchmarks python benchmarks/bench_tracing.py
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stemserve.service.config.tracing import TracingConfig
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.tracing.call_trace import CallTrace, GroupRun, StepShare, TracedStep
from stemserve.service.tracing.otlp_export import OtlpExport
from stemserve.service.tracing.trace_context import SpanIds, new_span_id, new_trace_id
from stemserve.service.tracing.tracer import Tracer

METHOD = "/stemserve.v1.Inference/Score"
METADATA = (
    ("user-agent", "grpc-python-asyncio/1.85.3 grpc-c/53.0.0 (linux; chttp2)"),
    ("x-prefix-id", "0123456789abcdef01234567"),
)
ROUNDS = 15
GROUP = GroupRun("decode", "codec", "cost_model", 64, 64, 10**9, 10**9, 0.001, 0.001)


class _Call:
    """What a CallWatch asks of gRPC."""

    def invocation_metadata(self) -> Any:
        return METADATA


def main() -> None:
    print("a call, on the RPC loop:")
    print(f"  not traced        {1e6 * _watching(CallWatch()):6.1f} us")
    for ratio, name in ((0.0, "not sampled       "), (1.0, "sampled           ")):
        tracer = Tracer(TracingConfig(sample_ratio=ratio), lambda trace: None)
        print(f"  {name}{1e6 * _watching(CallWatch(tracer)):6.1f} us")
    export = OtlpExport(
        InMemorySpanExporter(), version="0", max_queued_spans=1, note=lambda outcome, count: None
    )
    print("its spans, on the exporter's thread, made and encoded:")
    for steps in (1, 64):
        trace = _ended_call(steps)
        spans = len(export.readable(trace))
        seconds = _best(partial(_encode, export, trace), 20)
        print(f"  {steps:2} steps, {spans:3} spans {1e6 * seconds:8.0f} us")
    export.close(1.0)


def _encode(export: OtlpExport, trace: CallTrace) -> bytes:
    return encode_spans(export.readable(trace)).SerializeToString()


def _watching(watch: CallWatch) -> float:
    call: Any = _Call()

    def once() -> None:
        watch.begin(METHOD, call)
        watch.end("OK", 0.01)

    return _best(once, 3000)


def _best(function: Callable[[], object], times: int) -> float:
    """Seconds of CPU time a call of the function, in the fastest of many rounds."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(times):
            function()
        rounds.append((time.process_time() - began) / times)
    return min(rounds)


def _ended_call(steps: int) -> CallTrace:
    trace = CallTrace(
        method=METHOD[1:],
        ids=SpanIds(trace_id=new_trace_id(), span_id=new_span_id()),
        is_remote_parent=False,
        began_s=0.0,
        epoch_s=time.time(),
        max_steps=steps,
    )
    trace.submit(0.0)
    for number in range(steps):
        step = TracedStep(step_id=number, plan_began_s=0.0, plan_ended_s=0.0, rows=64, repeat=1)
        trace.take_step(StepShare(step=step, prefill_rows=4, decode_rows=0))
        step.groups = (GROUP,)
        step.answered_s = 1.0
    trace.end(1.0, "OK", "")
    return trace


if __name__ == "__main__":
    main()
