"""Give each call a name, follow it if it is traced, and write its line in the log."""

import logging
import random
import re
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import grpc

from stemserve.service.call_facts import CallFacts, current_call, set_call
from stemserve.service.caller import current_caller
from stemserve.service.metadata_keys import ROUTING_KEY
from stemserve.service.tracing.trace_context import remote_parent
from stemserve.service.tracing.tracer import Tracer

CALL_ID_KEY = "x-request-id"  # as proxies set it
MOST_KEY_CHARACTERS = 256
_CALL_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger("stemserve.calls")


class CallWatch:
    def __init__(self, tracer: Tracer | None = None, *, log_calls: bool = False) -> None:
        """`log_calls`: one line for each call that has ended."""
        self._tracer = tracer
        self._log_calls = log_calls
        self._numbers = count(1 + random.SystemRandom().getrandbits(63))

    def begin(self, method: str, context: Context) -> None:
        """For the task of the call. `method` is its full name, with the first slash."""
        began_s = time.monotonic()
        metadata = text_metadata(context)
        trace = None
        if self._tracer is not None:
            trace = self._tracer.begin(method[1:], remote_parent(metadata), began_s)
        set_call(
            CallFacts(
                method=method[1:],
                given_id=_checked_id(metadata.get(CALL_ID_KEY, "")),
                number=next(self._numbers),
                routing_key=metadata.get(ROUTING_KEY, "")[:MOST_KEY_CHARACTERS],
                trace=trace,
            )
        )

    def begin_on_stream(self, method: str, context: Context) -> None:
        """One of the calls of a stream. It is part of the caller's trace, or else has its own, with
        a link to the stream's: a stream may have any number of calls."""
        stream, trace = current_call(), None
        if self._tracer is not None:
            parent = remote_parent(text_metadata(context))
            link = None if stream.trace is None else stream.trace.ids
            trace = self._tracer.begin(method[1:], parent, time.monotonic(), link=link)
        set_call(
            CallFacts(
                method=method[1:],
                number=next(self._numbers),
                routing_key=stream.routing_key,
                trace=trace,
            )
        )

    def end(self, code: str, seconds: float, error: BaseException | None = None) -> None:
        """Of the call of this task. What the error says is left out: it may quote the request."""
        facts, problem = current_call(), "" if error is None else type(error).__name__
        if facts.trace is not None and self._tracer is not None:
            if tenant := current_caller().tenant:
                facts.trace.attributes["stemserve.tenant"] = tenant
            facts.trace.attributes["stemserve.call.id"] = facts.call_id
            self._tracer.end(facts.trace, code, problem)
        if self._log_calls:
            _log_line(facts, code, seconds, problem)


def _checked_id(given: str) -> str:
    return given if given and _CALL_ID.fullmatch(given) else ""


def text_metadata(context: Context) -> Mapping[str, str]:
    pairs: Any = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _log_line(facts: CallFacts, code: str, seconds: float, problem: str) -> None:
    fields = {"method": facts.method, "code": code, "seconds": round(seconds, 6)}
    if tenant := current_caller().tenant:
        fields["tenant"] = tenant
    if problem:
        fields["problem"] = problem
    text = f"{facts.method} {code} {seconds * 1e3:.1f} ms, call {facts.call_id}"
    _log.info("%s", text, extra={"fields": fields})
