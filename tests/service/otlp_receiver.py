"""A receiver of traces as collectors have it: OTLP's trace service on a real gRPC server."""

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.service.certificates import Identity

ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class Receiver:
    endpoint: str
    requests: list[trace_service_pb2.ExportTraceServiceRequest] = field(default_factory=list[Any])
    open: Event = field(default_factory=Event)  # it answers; else it keeps senders waiting

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    @property
    def resource(self) -> Mapping[str, object]:
        return values(self.requests[0].resource_spans[0].resource.attributes)

    def of_trace(self, trace_id: bytes) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def otlp_receiver(identity: Identity | None = None) -> Generator[Receiver]:
    """With an identity it speaks TLS."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        if identity is None:
            receiver = Receiver(endpoint=f"http://127.0.0.1:{server.add_insecure_port(ANY_PORT)}")
        else:
            pair = (identity.private_key.read_bytes(), identity.certificate.read_bytes())
            port = server.add_secure_port(ANY_PORT, grpc.ssl_server_credentials([pair]))
            receiver = Receiver(endpoint=f"https://localhost:{port}")
        receiver.open.set()

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(
                self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
            ) -> trace_service_pb2.ExportTraceServiceResponse:
                receiver.open.wait(30)
                receiver.requests.append(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        services: Any = trace_service_pb2_grpc  # has no types
        services.add_TraceServiceServicer_to_server(Traces(), server)
        server.start()
        try:
            yield receiver
        finally:
            receiver.open.set()
            server.stop(None).wait()


def values(attributes: Sequence[KeyValue]) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
