"""Measure a Score row: calls with prefixes that nobody has seen, then with registered ones."""

from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.client_pool import Made
from stemserve.service.bench.client_process import SCORE, CallRecord
from stemserve.service.bench.measured import MeasuredRow, median_ms, percentiles, rounded
from stemserve.service.bench.rows import ScoreRow
from stemserve.service.bench.scrape import Reading
from stemserve.service.bench.target import Target
from stemserve.service.bench.tokens import ScoreRound

WARM_ROUNDS_AT = 1_000  # numbers of rounds whose prefixes are registered first
LABELS = 2


@dataclass(slots=True)
class _Collected:
    seconds: list[float] = field(default_factory=list[float])  # of rounds
    call_seconds: list[float] = field(default_factory=list[float])
    engine_seconds: list[float] = field(default_factory=list[float])  # of calls
    outside_seconds: list[float] = field(default_factory=list[float])  # of calls, engine left out
    computed: list[int] = field(default_factory=list[int])  # tokens of calls
    avoided_bytes: list[int] = field(default_factory=list[int])  # of calls
    failures: list[str] = field(default_factory=list[str])
    logprobs: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])


def measure_score(target: Target, row: ScoreRow) -> MeasuredRow:
    cold = _Collected()
    for number in range(target.repeats.warm_up):
        _round(target, row, target.tokens.score_round(row, number), cold)
    checked = cold.logprobs[:1]
    cold = _Collected(failures=cold.failures)
    before = target.metrics()
    for number in range(target.repeats.score):
        _round(target, row, target.tokens.score_round(row, target.repeats.warm_up + number), cold)
    grown = target.metrics().since(before)
    warm = _measure_warm(target, row)
    failures = [*cold.failures, *warm.failures]
    ours_ms = median_ms(cold.seconds)
    items = row.items * row.calls
    more: dict[str, float | bool | None] = {
        "items_per_s": rounded(items * 1e3 / ours_ms) if ours_ms else None,
        "warm_ms": median_ms(warm.seconds),
        "warm_computes_items_only": bool(warm.computed)
        and max(warm.computed) <= row.call_item_tokens,
        "engine_ms": median_ms(cold.engine_seconds),
        "outside_engine_ms": median_ms(cold.outside_seconds),
        "outside_engine_kept": _is_kept(cold),
        "kv_avoided_bytes": median(cold.avoided_bytes) if cold.avoided_bytes else None,
        **_worker_times(grown, target.repeats.score),
    }
    return MeasuredRow(
        row=row,
        ours_ms=ours_ms,
        rounds_ms=tuple(rounded(seconds * 1e3) for seconds in cold.seconds),
        failures=len(failures),
        first_failure=failures[0] if failures else "",
        times=percentiles(cold.call_seconds),
        logprobs=checked[0] if checked else np.empty(0),
        more=more,
    )


def _measure_warm(target: Target, row: ScoreRow) -> _Collected:
    warm = _Collected()
    for number in range(1 + target.repeats.score):
        tokens = target.tokens.score_round(row, WARM_ROUNDS_AT + number)
        prefix_ids = target.register(tokens.prefixes)
        _round(target, row, tokens, warm, prefix_ids)
        target.release(prefix_ids)
        if number == 0:
            warm = _Collected(failures=warm.failures)
    return warm


def _round(
    target: Target,
    row: ScoreRow,
    tokens: ScoreRound,
    collected: _Collected,
    prefix_ids: tuple[str, ...] = (),
) -> None:
    made = target.pool.make(SCORE, tokens.requests(prefix_ids))
    answers = [_checked(record, row, collected) for record in made.records]
    if any(answer is None for answer in answers):
        return
    collected.seconds.append(_wall(made))
    collected.logprobs.append(
        np.log(np.array([a.scores for a in answers if a])).reshape(row.calls, row.items, LABELS)
    )


def _wall(made: Made) -> float:
    """From the first call that was sent to the last answer."""
    return max(r.done for r in made.records) - min(r.sent for r in made.records)


def _checked(
    record: CallRecord, row: ScoreRow, collected: _Collected
) -> inference_pb2.ScoreResponse | None:
    """Notes the call; None for a failed one."""
    if record.error:
        collected.failures.append(record.error)
        return None
    answer = inference_pb2.ScoreResponse.FromString(record.messages[0])
    if answer.errors or list(answer.shape) != [row.items, LABELS]:
        collected.failures.append(str(answer.errors[:1]) or f"shape {list(answer.shape)}")
        return None
    seconds, engine = record.done - record.sent, answer.timing.engine_seconds
    collected.call_seconds.append(seconds)
    collected.engine_seconds.append(engine)
    collected.outside_seconds.append(seconds - engine - answer.timing.queue_seconds)
    collected.computed.append(answer.usage.computed_tokens)
    collected.avoided_bytes.append(answer.usage.kv_avoided_bytes)
    return answer


def _is_kept(collected: _Collected) -> bool | None:
    """Whether a call takes 10 % or 2 ms, the larger, more than the engine alone."""
    if not collected.engine_seconds:
        return None
    return median(collected.outside_seconds) <= max(0.002, 0.1 * median(collected.engine_seconds))


def _worker_times(grown: Reading, rounds: int) -> dict[str, float | bool | None]:
    """Of a round. Steps overlap: their seconds may add up to more than a round's."""
    steps = grown.total("step_seconds_count")
    if not steps:
        return {}
    return {
        "steps": rounded(steps / rounds),
        "steps_ms": rounded(grown.total("step_seconds_sum") * 1e3 / rounds),
        "device_ms": rounded(grown.total("device_busy_seconds_total") * 1e3 / rounds),
    }
