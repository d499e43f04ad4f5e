"""Measure a Generate row: requests over one stored prefix, decoded together.

A token's time is what a round of n tokens takes longer than one of a single token, over n - 1: what
the prompts take, and that some requests are ahead of others, is in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stemserve.service.bench.client_process import GENERATE, CallRecord
from stemserve.service.bench.measured import MeasuredRow, median_ms, percentiles, rounded
from stemserve.service.bench.rows import DecodeRow
from stemserve.service.bench.scrape import Reading
from stemserve.service.bench.target import Target
from stemserve.service.bench.token_arrivals import CallFailed, TokenArrivals, token_arrivals

OTHERS = 10_000  # numbers of rounds with prompts as long, of other tokens
MOST_OVER_WORKER = 1.05  # that a token may take, of its time in the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    streams: Sequence[TokenArrivals]  # of the calls that did not fail
    busiest_client: float
    seconds_a_token: float


def measure_decode(target: Target, row: DecodeRow) -> MeasuredRow:
    prefix_ids = target.register(target.tokens.decode_round(row, 0).prefix[None])
    failures: list[str] = []
    rounds: list[_Round] = []
    before = target.metrics()
    for number in range(target.repeats.warm_up + target.repeats.decode):
        if number == target.repeats.warm_up:
            before = target.metrics()
        rounds.append(_round(target, row, number, failures))
    grown = target.metrics().since(before)
    target.release(prefix_ids)
    warm = rounds[target.repeats.warm_up :]
    counted = [made.streams for made in warm if made.streams]
    of_rounds = [made.seconds_a_token for made in warm] if counted else []
    ours_ms = median_ms(of_rounds)
    if ours_ms is not None and ours_ms <= 0:
        failures.append(
            f"{row.new_tokens} tokens took no longer than one: the machine is not quiet"
        )
        ours_ms = None
    busiest = max(made.busiest_client for made in rounds)
    more = _more(counted, grown, row) | {"busiest_client": rounded(busiest)}
    if ours_ms and (worker_ms := more.get("worker_ms_a_token")):
        more["outside_worker_kept"] = ours_ms <= MOST_OVER_WORKER * worker_ms
    return MeasuredRow(
        row=row,
        ours_ms=ours_ms,
        rounds_ms=tuple(rounded(seconds * 1e3) for seconds in of_rounds),
        failures=len(failures),
        first_failure=failures[0] if failures else "",
        times=percentiles(gap for streams in counted for s in streams for gap in s.gaps.tolist()),
        logprobs=np.array([stream.first_logprob for stream in rounds[0].streams]),
        more=more,
    )


def _round(target: Target, row: DecodeRow, number: int, failures: list[str]) -> _Round:
    """The requests of a round twice: of other tokens for one new token, then for all."""
    others = target.tokens.decode_round(row, OTHERS + number).requests(1)
    one = target.pool.make(GENERATE, others)
    failures += [record.error for record in one.records if record.error]
    requests = target.tokens.decode_round(row, number).requests(row.new_tokens)
    made = target.pool.make(GENERATE, requests)
    streams = [_arrivals(record, row, failures) for record in made.records]
    return _Round(
        streams=[stream for stream in streams if stream is not None],
        busiest_client=made.busiest_client,
        seconds_a_token=(made.seconds - one.seconds) / (row.new_tokens - 1),
    )


def _more(
    counted: Sequence[Sequence[TokenArrivals]], grown: Reading, row: DecodeRow
) -> dict[str, float | bool | None]:
    first = percentiles(s.seconds_to_first for streams in counted for s in streams)
    avoided = [sum(s.kv_avoided_bytes for s in streams) for streams in counted]
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
        "worker_ms_a_token": _ms(busy + idle, decoded),
        "gpu_idle_fraction": rounded(idle / (busy + idle)) if busy else None,
        "device_busy_s": rounded(busy),
        "device_idle_s": rounded(idle),
    }


def _ms(seconds: float, count: float) -> float | None:
    return rounded(seconds * 1e3 / count) if count and seconds else None


def _arrivals(record: CallRecord, row: DecodeRow, failures: list[str]) -> TokenArrivals | None:
    """None, and a note, for a call that failed."""
    try:
        return token_arrivals(record, row.new_tokens)
    except CallFailed as error:
        failures.append(str(error))
        return None
