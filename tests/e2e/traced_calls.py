"""Calls with a secret in them and a caller's span around them, and the spans of their traces."""

import asyncio
import secrets
from collections.abc import Sequence

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.service.otlp_receiver import Receiver

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client

SECRET = "xylophone quartz"  # of the requests; no span may have it
PATIENCE_S = 30.0


class Caller:
    """The span of a caller, around its calls."""

    def __init__(self, *, is_sampled: bool = True) -> None:
        self.trace_id = secrets.token_bytes(16)
        self.span_id = secrets.token_bytes(8)
        self.flags = f"{is_sampled:02x}"

    def headers(self) -> Sequence[tuple[str, str]]:
        parent = f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.flags}"
        return (("traceparent", parent), ("tracestate", "shop=7"))


def score_request(items: int = 5) -> inference_pb2.ScoreRequest:
    texts = [f"{SECRET} {item}" for item in range(items)]
    request = inference_pb2.ScoreRequest(query=SECRET * 3, items=texts, request_id="mine")
    request.log_likelihood.SetInParent()
    return request


async def trace_of(receiver: Receiver, caller: Caller) -> list[Span]:
    """Once its call's own span, which comes with all others of the call, is there."""
    async with asyncio.timeout(PATIENCE_S):
        while not (spans := receiver.of_trace(caller.trace_id)):
            await asyncio.sleep(0.05)
    assert SECRET not in str(spans) and "xylophone" not in str(spans)
    return spans


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def children(spans: Sequence[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


def names(spans: Sequence[Span]) -> list[str]:
    return [span.name for span in spans]


async def generate(client: Client, tokens: int = 3000) -> None:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text=SECRET), max_new_tokens=tokens, ignore_eos=True
    )
    async for _ in client.generate(request):
        pass
