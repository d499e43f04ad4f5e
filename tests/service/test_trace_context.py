"""The ids that a caller sends, by the rules of W3C Trace Context."""

import secrets

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from stemserve.service.tracing.trace_context import chosen, new_trace_id, remote_parent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("parent", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # flags of later levels are let be
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-01", True),  # a later version is read as far as this one goes
        (f"cc-{TRACE}-{SPAN}-01-what-is-new", True),
    ],
)
def test_a_parent_is_read(parent: str, is_sampled: bool) -> None:
    found = remote_parent({"traceparent": parent, "tracestate": "a=1"})
    assert found is not None
    assert (found.trace_id, found.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert found.is_sampled is is_sampled and found.state == "a=1"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_parent_starts_a_new_trace(parent: str) -> None:
    assert remote_parent({"traceparent": parent}) is None


def test_without_a_parent_the_state_says_nothing() -> None:
    assert remote_parent({"tracestate": "a=1"}) is None


def test_a_state_that_is_too_long_is_dropped() -> None:
    found = remote_parent({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=" + "1" * 511})
    assert found is not None and found.state == ""


@pytest.mark.parametrize("ratio", [0.0, 1.0, None])
def test_traces_are_chosen_as_other_services_choose_them(ratio: float | None) -> None:
    if ratio is None:
        ratio = secrets.randbelow(10**6) / 10**6
    theirs = TraceIdRatioBased(ratio)
    for trace_id in [new_trace_id() for _ in range(300)]:
        decision = theirs.should_sample(None, trace_id, "").decision
        assert chosen(trace_id, ratio) is (decision is Decision.RECORD_AND_SAMPLE), ratio
