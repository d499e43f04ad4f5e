"""Calls that come at random moments, at a rising rate, whether or not earlier ones are answered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.client_pool import Made
from stemserve.service.bench.client_process import SCORE
from stemserve.service.bench.measured import Percentiles, percentiles, rounded
from stemserve.service.bench.rows import ScoreRow
from stemserve.service.bench.target import Target
from stemserve.service.bench.tokens import TokenSource

MOST_P99_MS = 500.0
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """A call scores items of their own over a prefix that they share and nobody has seen."""

    model: str = "0.6B"
    shared_tokens: int = 120
    own_tokens: int = 180
    items: int = 10  # of a call
    first_items_per_s: float = 500.0
    more_items_per_s: float = 500.0  # from one rate to the next
    most_items_per_s: float = 20_000.0
    seconds: float = 6.0  # of a rate

    @property
    def name(self) -> str:
        return f"open-loop {self.model} {self.shared_tokens}+{self.own_tokens}/{self.items}"

    @property
    def row(self) -> ScoreRow:
        return ScoreRow(
            model=self.model,
            prefix_tokens=self.shared_tokens,
            item_tokens=self.own_tokens,
            items=self.items,
            calls=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What came of one rate. Latency counts from the moment that a call was due."""

    asked_items_per_s: float
    items_per_s: float  # scored, until the last answer
    calls: int
    failures: int
    first_failure: str
    latency: Percentiles | None
    send_lag: Percentiles | None  # of the client, behind the moments that were due
    busiest_client: float  # share of its time for which a client process used a core

    @property
    def is_kept(self) -> bool:
        return not self.failures and self.latency is not None and self.latency.p99 <= MOST_P99_MS


def measure_open_loop(
    target: Target, loop: OpenLoop, advance: Callable[[str], None]
) -> tuple[Level, ...]:
    """Rates until one is not kept, that one too."""
    rng = np.random.default_rng([target.tokens.seed, 1])
    _level(target, loop, loop.first_items_per_s, min(2.0, loop.seconds), rng)  # warm-up
    levels: list[Level] = []
    for rate in _rates(loop):
        advance(f"{loop.name}: {rate:.0f} items/s")
        levels.append(_level(target, loop, rate, loop.seconds, rng))
        if not levels[-1].is_kept:
            break
    return tuple(levels)


def best(levels: tuple[Level, ...]) -> float | None:
    """Items a second of the highest rate that was kept."""
    return max((level.items_per_s for level in levels if level.is_kept), default=None)


def _rates(loop: OpenLoop) -> Iterator[float]:
    rate = loop.first_items_per_s
    while rate <= loop.most_items_per_s:
        yield rate
        rate += loop.more_items_per_s


def _level(
    target: Target, loop: OpenLoop, rate: float, seconds: float, rng: np.random.Generator
) -> Level:
    gaps = rng.exponential(loop.items / rate, max(1, round(rate * seconds / loop.items)))
    source = TokenSource(vocab=target.tokens.vocab, seed=int(rng.integers(1 << 31)))
    requests = [source.score_round(loop.row, number).requests()[0] for number in range(len(gaps))]
    made = target.pool.make(SCORE, requests, after=np.cumsum(gaps).tolist(), timeout_s=TIMEOUT_S)
    return _level_of(made, loop, rate)


def _level_of(made: Made, loop: OpenLoop, rate: float) -> Level:
    failures = [record.error for record in made.records if record.error]
    answered = [record for record in made.records if not record.error]
    for record in answered:
        answer = inference_pb2.ScoreResponse.FromString(record.messages[0])
        if answer.errors or answer.shape[0] != loop.items:
            failures.append(str(answer.errors[:1]) or f"shape {list(answer.shape)}")
    first = made.records[0].due
    last = max((record.done for record in answered), default=first)
    return Level(
        asked_items_per_s=rate,
        items_per_s=rounded(len(answered) * loop.items / (last - first)) if answered else 0.0,
        calls=len(made.records),
        failures=len(failures),
        first_failure=failures[0] if failures else "",
        latency=percentiles(record.done - record.due for record in answered),
        send_lag=percentiles(record.sent - record.due for record in made.records),
        busiest_client=rounded(made.busiest_client),
    )
