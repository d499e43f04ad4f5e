"""Measure requests that share nothing: from the moment that they are due to the last token."""

import numpy as np

from stemserve.service.bench.client_process import GENERATE
from stemserve.service.bench.measured import MeasuredRow, median_ms, percentiles, rounded
from stemserve.service.bench.rows import UnsharedRow
from stemserve.service.bench.target import Target
from stemserve.service.bench.token_arrivals import CallFailed, TokenArrivals, token_arrivals


def measure_unshared(target: Target, row: UnsharedRow) -> MeasuredRow:
    failures: list[str] = []
    seconds: list[float] = []
    rounds: list[list[TokenArrivals]] = []
    for number in range(target.repeats.warm_up + target.repeats.decode):
        requests = target.tokens.unshared_round(row, number).requests(row.new_tokens)
        made = target.pool.make(GENERATE, requests)
        streams: list[TokenArrivals] = []
        for record in made.records:
            try:
                streams.append(token_arrivals(record, row.new_tokens))
            except CallFailed as error:
                failures.append(str(error))
        rounds.append(streams)
        if number >= target.repeats.warm_up and len(streams) == row.requests:
            seconds.append(made.seconds)
    counted = [stream for streams in rounds[target.repeats.warm_up :] for stream in streams]
    first = percentiles(stream.seconds_to_first for stream in counted)
    return MeasuredRow(
        row=row,
        ours_ms=median_ms(seconds),
        rounds_ms=tuple(rounded(value * 1e3) for value in seconds),
        failures=len(failures),
        first_failure=failures[0] if failures else "",
        times=percentiles(gap for stream in counted for gap in stream.gaps.tolist()),
        logprobs=np.array([stream.first_logprob for stream in rounds[0]]),
        more={
            "ttft_p50_ms": first.p50 if first else None,
            "ttft_p99_ms": first.p99 if first else None,
        },
    )
