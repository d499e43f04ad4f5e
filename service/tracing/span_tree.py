"""The spans of a call that has ended.

    stemserve.v1.Inference/Score           the call
    ├── tokenize                           until the engine has its job: read, check, tokenise
    ├── queue                              until its first step is planned
    └── engine                             until its last result
        └── step                           one for each of the first steps with rows of the call
            ├── plan                       making its plan
            └── run                        in the worker, by the worker's clock
                └── attention codec        one for each attention group, with what it cost

A group's time is that of all layers: its span is as long as they took together, and begins where
the one before ends, though in truth they take turns layer by layer. One that was not timed has no
length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemserve.service.tracing.call_trace import CallTrace, GroupRun, StepShare, TracedStep, Value
from stemserve.service.tracing.trace_context import new_span_id

NS = 1e9
# Codes that say that the server did not do what it should; others are for the caller to mend.
SERVER_FAULTS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpan:
    """One span of a call's tree; the trace's id and the state are the call's."""

    name: str
    span_id: int
    parent_id: int | None
    start_ns: int  # since 1970
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])
    failure: str = ""  # the span's status is an error: why, in a word


class _Tree:
    def __init__(self, trace: CallTrace) -> None:
        self.spans: list[CallSpan] = []
        self._epoch_s = trace.epoch_s

    def add(
        self,
        name: str,
        parent_id: int | None,
        times_s: tuple[float, float],  # monotonic
        attributes: Mapping[str, Value] | None = None,
        *,
        span_id: int | None = None,
        failure: str = "",
    ) -> int:
        """The new span's id."""
        began_s, ended_s = times_s
        start_ns = round((began_s + self._epoch_s) * NS)
        span = CallSpan(
            name=name,
            span_id=new_span_id() if span_id is None else span_id,
            parent_id=parent_id,
            start_ns=start_ns,
            end_ns=max(start_ns, round((ended_s + self._epoch_s) * NS)),
            attributes=attributes or {},
            failure=failure,
        )
        self.spans.append(span)
        return span.span_id


def spans_of(trace: CallTrace) -> list[CallSpan]:
    """Parents before children; the call itself is the first."""
    ended_s = trace.began_s if trace.ended_s is None else trace.ended_s
    tree = _Tree(trace)
    call = tree.add(
        trace.method,
        trace.ids.parent_id,
        (trace.began_s, ended_s),
        _call_attributes(trace),
        span_id=trace.ids.span_id,
        failure=trace.code if trace.code in SERVER_FAULTS else "",
    )
    if trace.submitted_s is None:
        return tree.spans
    tree.add("tokenize", call, (trace.began_s, trace.submitted_s))
    shares = tuple(trace.shares)
    if not shares:
        tree.add("queue", call, (trace.submitted_s, ended_s))
        return tree.spans
    first_s = shares[0].step.plan_began_s
    tree.add("queue", call, (trace.submitted_s, first_s))
    totals: dict[str, Value] = {
        "stemserve.steps": trace.num_steps,
        "stemserve.steps.worker_seconds": trace.worker_seconds,
        "stemserve.steps.shown": len(shares),
    }
    engine = tree.add("engine", call, (first_s, ended_s), totals)
    for share in shares:
        _add_step(tree, engine, share, ended_s)
    return tree.spans


def count_spans(trace: CallTrace) -> int:
    """How many `spans_of` makes."""
    if trace.submitted_s is None:
        return 1
    steps = [share.step for share in trace.shares]
    inside = sum(2 + (0 if s.answered_s is None else 1 + len(s.groups)) for s in steps)
    return 3 + (1 + inside if steps else 0)


def _call_attributes(trace: CallTrace) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "rpc.system.name": "grpc",
        "rpc.method": trace.method,
        "rpc.response.status_code": trace.code,
        **trace.attributes,
    }
    if trace.code != "OK":
        attributes["error.type"] = trace.code
    if trace.problem:
        attributes["stemserve.error"] = trace.problem
    if trace.first_token_s is not None:
        seconds = trace.first_token_s - trace.began_s
        attributes["gen_ai.response.time_to_first_chunk"] = seconds
    return attributes


def _add_step(tree: _Tree, engine: int, share: StepShare, call_ended_s: float) -> None:
    step = share.step
    ended_s = call_ended_s if step.answered_s is None else step.answered_s
    attributes: dict[str, Value] = {
        "stemserve.step.id": step.step_id,
        "stemserve.step.rows": step.rows,
        "stemserve.step.rows.prefill": share.prefill_rows,
        "stemserve.step.rows.decode": share.decode_rows,
        "stemserve.step.repeat": step.repeat,
        "stemserve.step.answered": step.answered_s is not None,
    }
    failure = "failed" if step.failed else ""
    span = tree.add("step", engine, (step.plan_began_s, ended_s), attributes, failure=failure)
    tree.add("plan", span, (step.plan_began_s, step.plan_ended_s))
    if step.answered_s is not None:
        _add_run(tree, span, step, step.answered_s)


def _add_run(tree: _Tree, parent: int, step: TracedStep, answered_s: float) -> None:
    began_s = max(step.plan_ended_s, answered_s - step.worker_seconds)
    attributes: dict[str, Value] = {
        "stemserve.run.worker_seconds": step.worker_seconds,
        "stemserve.run.trees": step.trees,
    }
    if step.device_seconds:
        attributes["stemserve.run.device_seconds"] = step.device_seconds
    run = tree.add("run", parent, (began_s, answered_s), attributes)
    for group in step.groups:
        ended_s = began_s + group.actual_seconds
        tree.add(f"attention {group.kernel}", run, (began_s, ended_s), _group_attributes(group))
        began_s = ended_s


def _group_attributes(group: GroupRun) -> dict[str, Value]:
    named: dict[str, Value] = {
        "stemserve.attention.phase": group.phase,
        "stemserve.attention.kernel": group.kernel,
        "stemserve.attention.reason": group.reason,
        "stemserve.attention.rows": group.rows,
        "stemserve.attention.segments": group.segments,
        "stemserve.attention.kv_read_bytes": group.kv_read_bytes,
        "stemserve.attention.kv_avoided_bytes": group.kv_avoided_bytes,
    }
    if group.actual_seconds > 0:
        named["stemserve.attention.predicted_seconds"] = group.predicted_seconds
        named["stemserve.attention.actual_seconds"] = group.actual_seconds
    return named
