"""What is known of the call that runs in this task, beside who makes it."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stemserve.service.tracing.call_trace import CallTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    method: str = ""  # full name, without the first slash
    given_id: str = ""  # by a proxy
    number: int = 0  # 64 bits; not 0: there is a call
    routing_key: str = ""  # by which a router chose this server; empty: the call had none
    trace: "CallTrace | None" = None  # of a call that is sampled

    @property
    def call_id(self) -> str:
        """Of the log; empty: there is no call."""
        return self.given_id or (f"{self.number:016x}" if self.number else "")

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Labels that lead from a histogram to the call's trace."""
        return None if self.trace is None else {"trace_id": self.trace.ids.hex_trace_id}


NO_CALL = CallFacts()

_call: ContextVar[CallFacts] = ContextVar("call", default=NO_CALL)


def current_call() -> CallFacts:
    return _call.get()


def set_call(facts: CallFacts) -> None:
    """For the task of one call."""
    _call.set(facts)


def log_context() -> dict[str, str]:
    """Of a line that is logged in this task."""
    facts = current_call()
    call_id = facts.call_id
    context = {"call_id": call_id} if call_id else {}
    if facts.trace is not None:
        context["trace_id"] = facts.trace.ids.hex_trace_id
        context["span_id"] = f"{facts.trace.ids.span_id:016x}"
    return context
