"""When the tokens of a Generate call came, by its messages."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.client_process import CallRecord


class CallFailed(Exception):
    """The call has no times that count; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenArrivals:
    moments: NDArray[np.float64]  # [messages] of those with tokens
    tokens: NDArray[np.int64]  # [messages] how many came
    first_logprob: float
    sent: float
    kv_avoided_bytes: int

    @property
    def seconds_to_first(self) -> float:
        return float(self.moments[0] - self.sent)

    @property
    def gaps(self) -> NDArray[np.float64]:
        """[tokens behind the first message] seconds; those of a message share the time since the
        message before."""
        return np.repeat(np.diff(self.moments) / self.tokens[1:], self.tokens[1:])


def token_arrivals(record: CallRecord, new_tokens: int) -> TokenArrivals:
    """Raises CallFailed."""
    if record.error:
        raise CallFailed(record.error)
    messages = [inference_pb2.GenerateResponse.FromString(m) for m in record.messages]
    counts = np.array([len(message.token_ids) for message in messages], dtype=np.int64)
    if counts.sum() != new_tokens:
        raise CallFailed(f"{counts.sum()} tokens came instead of {new_tokens}")
    some = np.flatnonzero(counts)
    return TokenArrivals(
        moments=np.array(record.arrivals)[some],
        tokens=counts[some],
        first_logprob=messages[int(some[0])].logprobs[0],
        sent=record.sent,
        kv_avoided_bytes=messages[-1].usage.kv_avoided_bytes,
    )
