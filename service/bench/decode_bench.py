"""Measure a Generate row: requests over one stored prefix, decoded together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.client_process import GENERATE, CallRecord
from stemserve.service.bench.measured import MeasuredRow, median_ms, percentiles, rounded
from stemserve.service.bench.rows import DecodeRow
from stemserve.service.bench.scrape import Reading
from stemserve.service.bench.target import Target


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stream:
    """One call's messages with tokens."""

    arrivals: NDArray[np.float64]  # [messages]
    tokens: NDArray[np.int64]  # [messages] how many came
    first_logprob: float
    sent: float
    avoided_bytes: int

    @property
    def seconds_per_token(self) -> float:
        return float((self.arrivals[-1] - self.arrivals[0]) / self.tokens[1:].sum())

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Between tokens; those of one message share the time since the message before."""
        return np.repeat(np.diff(self.arrivals) / self.tokens[1:], self.tokens[1:])


def measure_decode(target: Target, row: DecodeRow) -> MeasuredRow:
    prefix_ids = target.register(target.tokens.decode_round(row, 0).prefix[None])
    failures: list[str] = []
    rounds: list[list[_Stream]] = []
    clients: list[float] = []
    before = target.metrics()
    for number in range(target.repeats.warm_up + target.repeats.decode):
        if number == target.repeats.warm_up:
            before = target.metrics()
        requests = target.tokens.decode_round(row, number).requests(row.new_tokens)
        made = target.pool.make(GENERATE, requests)
        streams = [_stream(record, row, failures) for record in made.records]
        rounds.append([stream for stream in streams if stream is not None])
        clients.append(made.busiest_client)
    grown = target.metrics().since(before)
    target.release(prefix_ids)
    counted = [streams for streams in rounds[target.repeats.warm_up :] if streams]
    of_rounds = [float(np.median([s.seconds_per_token for s in streams])) for streams in counted]
    return MeasuredRow(
        row=row,
        ours_ms=median_ms(of_rounds),
        rounds_ms=tuple(rounded(seconds * 1e3) for seconds in of_rounds),
        failures=len(failures),
        first_failure=failures[0] if failures else "",
        times=percentiles(gap for streams in counted for s in streams for gap in s.gaps.tolist()),
        logprobs=np.array([stream.first_logprob for stream in rounds[0]]),
        more=_more(counted, grown, row) | {"busiest_client": rounded(max(clients))},
    )


def _more(
    counted: Sequence[Sequence[_Stream]], grown: Reading, row: DecodeRow
) -> dict[str, float | bool | None]:
    first = percentiles(s.arrivals[0] - s.sent for streams in counted for s in streams)
    avoided = [sum(s.avoided_bytes for s in streams) for streams in counted]
    more: dict[str, float | bool | None] = {
        "ttft_p50_ms": first.p50 if first else None,
        "ttft_p99_ms": first.p99 if first else None,
        "kv_avoided_bytes": float(np.median(avoided)) if avoided else None,
    }
    if not counted or not grown.series:
        return more
    busy = grown.total("device_busy_seconds_total", phase="decode")
    idle = grown.total("device_idle_seconds_total", phase="decode")
    told = grown.total("time_per_output_token_seconds_count")
    # The first token of a request comes out of a prefill step.
    decoded = len(counted) * (row.new_tokens - 1)
    return more | {
        "server_tpot_ms": _ms(grown.total("time_per_output_token_seconds_sum"), told),
        "device_ms_a_token": _ms(busy, decoded),
        "gpu_idle_fraction": rounded(idle / (busy + idle)) if busy else None,
        "device_busy_s": rounded(busy),
        "device_idle_s": rounded(idle),
    }


def _ms(seconds: float, count: float) -> float | None:
    return rounded(seconds * 1e3 / count) if count and seconds else None


def _stream(record: CallRecord, row: DecodeRow, failures: list[str]) -> _Stream | None:
    """None, and a note, for a call that failed."""
    if record.error:
        failures.append(record.error)
        return None
    messages = [inference_pb2.GenerateResponse.FromString(m) for m in record.messages]
    counts = np.array([len(message.token_ids) for message in messages])
    if counts.sum() != row.new_tokens:
        failures.append(f"{counts.sum()} tokens came instead of {row.new_tokens}")
        return None
    some = np.flatnonzero(counts)
    if len(some) < 2:
        failures.append("all tokens came in one message")
        return None
    return _Stream(
        arrivals=np.array(record.arrivals)[some],
        tokens=counts[some],
        first_logprob=messages[int(some[0])].logprobs[0],
        sent=record.sent,
        avoided_bytes=messages[-1].usage.kv_avoided_bytes,
    )
