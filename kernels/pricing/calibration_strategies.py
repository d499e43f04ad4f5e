"""Measure whole strategies over many layouts."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.kernels.pricing.calibration_layouts import (
    PAGE_SIZE,
    DecodeLimits,
    ScoreLimits,
    decode_layouts,
    score_shapes,
)
from stemserve.kernels.pricing.cost_correction import layout_features
from stemserve.kernels.pricing.cost_model import Costs, correction_key
from stemserve.kernels.pricing.engine_cost import Cost, Float64
from stemserve.kernels.pricing.engine_fit import Measurement
from stemserve.kernels.pricing.stopwatch import LAYERS, StrategyBench
from stemserve.kernels.strategy import TORCH, Kernel, Phase, Strategy, Work

HOPELESS = 5.0  # times the least estimate: never chosen, and not measured
WIDEST_TOKEN_BYTES = 2 * 2 * 32 * 128  # K and V of 32 KV heads of 128, 16 bits
SLOW_PLAN_S = 0.02  # nor what takes so long to plan, or would for more pairs of row and token


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured."""

    score: ScoreLimits
    score_layouts: int
    decode: DecodeLimits
    decode_layouts: int
    longest_s: float  # of a layer that is measured, by the first estimate
    budget_s: float  # after which the layouts that remain are left out

    @property
    def layouts(self) -> int:
        return self.score_layouts + self.decode_layouts

    @property
    def pages(self) -> int:
        return max(self.score.prefix, self.decode.tokens) // PAGE_SIZE + self.decode.requests + 2

    @property
    def rows(self) -> int:
        return max(self.score.rows + self.score.prefix, self.decode.requests)

    def within(self, memory_bytes: int) -> "Extent":
        """With fewer stored tokens if the inputs would be larger; as of the widest heads."""
        most = memory_bytes // (LAYERS * WIDEST_TOKEN_BYTES)
        return replace(self, decode=replace(self.decode, tokens=min(self.decode.tokens, most)))

    def draw(self) -> Iterator[tuple[Phase, AttentionLayout]]:
        """Both phases mixed, so that a budget cuts both."""
        scores = islice(score_shapes(self.score), self.score_layouts)
        decodes = islice(decode_layouts(self.decode), self.decode_layouts)
        done = 0
        for number, shape in enumerate(scores, start=1):
            yield Phase.PREFILL, shape.layout(np.random.default_rng(number))
            while done * self.score_layouts < number * self.decode_layouts:
                yield Phase.DECODE, next(decodes)
                done += 1
        for layout in decodes:
            yield Phase.DECODE, layout


CPU_EXTENT = Extent(
    score=ScoreLimits(prefix=1024, item_rows=64, items=48, rows=1024),
    score_layouts=60,
    decode=DecodeLimits(requests=32, node_tokens=2048, tokens=8192),
    decode_layouts=40,
    longest_s=0.03,
    budget_s=30.0,
)
GPU_EXTENT = Extent(
    score=ScoreLimits(),
    score_layouts=240,
    decode=DecodeLimits(),
    decode_layouts=80,
    longest_s=0.015,
    budget_s=80.0,
)


class SteeredCosts:
    """Costs with which a strategy that chooses its engines by cost takes those that are wanted."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._asked: list[str] = []
        self._wanted = ""

    @property
    def launch_seconds(self) -> float:
        return self._costs.launch_seconds

    def block_seconds(self, rows: Int32 | int, kv_tokens: Int32 | int) -> Float64:
        return self._costs.block_seconds(rows, kv_tokens)

    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost:
        key = correction_key(kernel, work)
        self._asked.append(key)
        seconds = float(key != self._wanted)
        return Cost(seconds, seconds)

    def want(self, key: str) -> None:
        """Of `correction_key`."""
        self._wanted = key

    def options(self, strategy: Strategy, layout: AttentionLayout) -> list[tuple[str, Work]]:
        """By key, what the strategy may do; one where it does not choose."""
        self._asked = []
        work = strategy.work(layout)
        found: list[tuple[str, Work]] = []
        for key in dict.fromkeys(self._asked or [correction_key(strategy.kernel, work)]):
            self.want(key)
            found.append((key, strategy.work(layout)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A strategy, with the engines of `key` if it may choose."""

    strategy: Strategy
    key: str
    work: Work
    estimate_s: float

    @property
    def pairs(self) -> int:
        return sum(int(part.pairs.sum()) for part in self.work.parts)


class StrategyMeter:
    """Measures what is promising."""

    def __init__(
        self,
        rig: StrategyBench,
        strategies: Sequence[Strategy],  # made with `costs`
        costs: SteeredCosts,
        estimate: Callable[[Work], float],  # seconds of a layer, roughly
    ) -> None:
        self._rig = rig
        self._strategies = strategies
        self._costs = costs
        self._estimate = estimate
        self._slow_pairs: dict[str, int] = {}  # by key: what took SLOW_PLAN_S to plan

    def measure(
        self, phase: Phase, layout: AttentionLayout, longest_s: float
    ) -> Iterator[Measurement]:
        """The most promising first; torch's paths only where there is nothing else."""
        options = list(self._options(phase, layout))
        faster = [o for o in options if any(p.engine != TORCH for p in o.work.parts)]
        options = sorted(faster or options, key=lambda option: option.estimate_s)
        features = tuple(round(float(value), 3) for value in layout_features(layout))
        best_s = np.inf
        for option in options:
            limit = min(longest_s, HOPELESS * min(best_s, options[0].estimate_s))
            if option.estimate_s > limit or option.pairs >= self._slow_pairs.get(
                option.key, 1 << 62
            ):
                continue
            self._costs.want(option.key)
            cost = self._rig.measure(option.strategy, self._plan(option, layout), layout.num_rows)
            best_s = min(best_s, cost.seconds)
            yield Measurement(
                phase=phase,
                kernel=option.strategy.kernel,
                features=features,
                work=option.work,
                cost=cost,
            )

    def _options(self, phase: Phase, layout: AttentionLayout) -> Iterator[Option]:
        for strategy in self._strategies:
            if strategy.phase is phase and strategy.refusal(layout) is None:
                for key, work in self._costs.options(strategy, layout):
                    yield Option(
                        strategy=strategy, key=key, work=work, estimate_s=self._estimate(work)
                    )

    def _plan(self, option: Option, layout: AttentionLayout) -> Any:
        started = time.perf_counter()
        plan = option.strategy.plan(layout)
        if time.perf_counter() - started > SLOW_PLAN_S:
            self._slow_pairs[option.key] = option.pairs
        return plan


def measure_strategies(
    meter: StrategyMeter, extent: Extent, progress: Callable[[], None]
) -> list[Measurement]:
    """`progress` is called before each layout, measured or left out."""
    started = time.perf_counter()
    measured: list[Measurement] = []
    for phase, layout in extent.draw():
        progress()
        if time.perf_counter() - started <= extent.budget_s:
            measured += meter.measure(phase, layout, extent.longest_s)
    return measured
