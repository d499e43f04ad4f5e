"""Decide which calls are traced, and hand them over when they have ended."""

import time
from collections.abc import Callable

from stemserve.service.config.tracing import TracingConfig
from stemserve.service.tracing.call_trace import CallTrace
from stemserve.service.tracing.trace_context import (
    RemoteParent,
    SpanIds,
    chosen,
    new_span_id,
    new_trace_id,
)


class Tracer:
    def __init__(self, config: TracingConfig, hand_over: Callable[[CallTrace], None]) -> None:
        """`hand_over` must not block: it is called on the RPC loop."""
        self._config = config
        self._hand_over = hand_over
        self.model = ""  # known once a worker is

    def begin(
        self,
        method: str,
        parent: RemoteParent | None,
        began_s: float,
        *,
        link: SpanIds | None = None,
    ) -> CallTrace | None:
        """None where the call is not sampled. `began_s` is monotonic."""
        trace_id = new_trace_id() if parent is None else parent.trace_id
        if parent is not None and self._config.follow_callers:
            is_sampled = parent.is_sampled
        else:
            is_sampled = chosen(trace_id, self._config.sample_ratio)
        if not is_sampled:
            return None
        ids = SpanIds(
            trace_id=trace_id,
            span_id=new_span_id(),
            parent_id=None if parent is None else parent.span_id,
            state="" if parent is None else parent.state,
        )
        trace = CallTrace(
            method=method,
            ids=ids,
            is_remote_parent=parent is not None,
            began_s=began_s,
            epoch_s=time.time() - time.monotonic(),
            max_steps=self._config.max_steps,
            link=link,
        )
        if self.model:
            trace.attributes["gen_ai.request.model"] = self.model
        return trace

    def end(self, trace: CallTrace, code: str, problem: str) -> None:
        """`code` of gRPC; `problem`: the class of the error, never its text, which may quote."""
        trace.end(time.monotonic(), code, problem)
        self._hand_over(trace)
