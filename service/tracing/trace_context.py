"""Trace ids, and those that a caller sends: W3C Trace Context in a call's metadata."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

PARENT_KEY = "traceparent"
STATE_KEY = "tracestate"
MOST_STATE_CHARACTERS = 512  # more may be dropped
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNKNOWN_VERSION = "ff"  # never valid
_FIRST_VERSION = "00"  # has nothing behind its flags; later ones may
_SAMPLED = 1
_RATIO_BITS = 64

_ids = random.SystemRandom()  # ids of processes that are forked alike must differ too


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteParent:
    """The span of the caller in which a call was made."""

    trace_id: int  # 128 bits
    span_id: int  # 64 bits
    is_sampled: bool
    state: str = ""  # tracestate, as it came


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanIds:
    """Of a call's own span."""

    trace_id: int
    span_id: int
    parent_id: int | None = None
    state: str = ""

    @property
    def hex_trace_id(self) -> str:
        return f"{self.trace_id:032x}"


def remote_parent(metadata: Mapping[str, str]) -> RemoteParent | None:
    """None where there is none, or none that can be believed."""
    text = metadata.get(PARENT_KEY)
    found = _PARENT.fullmatch(text) if text is not None else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _UNKNOWN_VERSION or (version == _FIRST_VERSION and rest is not None):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = metadata.get(STATE_KEY, "")
    return RemoteParent(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_sampled=bool(int(flags, 16) & _SAMPLED),
        state=state if len(state) <= MOST_STATE_CHARACTERS else "",
    )


def new_trace_id() -> int:
    return _ids.getrandbits(128) or 1


def new_span_id() -> int:
    return _ids.getrandbits(64) or 1


def chosen(trace_id: int, ratio: float) -> bool:
    """Whether this share of all traces has the trace in it: the same answer in every service that
    decides by the id's last 64 bits, as OpenTelemetry's samplers by ratio do."""
    return trace_id % (1 << _RATIO_BITS) < round(ratio * (1 << _RATIO_BITS))
