"""Measure whole strategies over many layouts."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from stemserve.kernels.calibration_layouts import (
    PAGE_SIZE,
    DecodeLimits,
    ScoreLimits,
    decode_layouts,
    score_shapes,
)
from stemserve.kernels.cost_correction import layout_features
from stemserve.kernels.engine_fit import Measurement
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.stopwatch import Bench, StrategyBench
from stemserve.kernels.strategy import TORCH, Phase, Strategy, Work

HOPELESS = 10.0  # times the least estimate: never chosen, and not measured


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

    def pages(self) -> int:
        return max(self.score.prefix, self.decode.tokens) // PAGE_SIZE + self.decode.requests + 2

    def rows(self) -> int:
        return max(self.score.rows + self.score.prefix, self.decode.requests)

    def draw(self) -> Iterator[tuple[Phase, AttentionLayout]]:
        """Both phases mixed, so that a budget cuts both."""
        scores = islice(score_shapes(self.score), self.score_layouts)
        decodes = islice(decode_layouts(self.decode), self.decode_layouts)
        done = 0
        for number, shape in enumerate(scores, start=1):
            yield Phase.PREFILL, shape.layout()
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
    score_layouts=280,
    decode=DecodeLimits(),
    decode_layouts=80,
    longest_s=0.015,
    budget_s=80.0,
)


def measure_strategies(
    bench: Bench,
    strategies: Sequence[Strategy],
    estimate: Callable[[Work], float],
    extent: Extent,
    progress: Callable[[], None],
) -> list[Measurement]:
    """`estimate` gives seconds; `progress` is called before each layout, measured or left out."""
    rig = StrategyBench(bench, pages=extent.pages(), page_size=PAGE_SIZE, rows=extent.rows())
    started = time.perf_counter()
    measured: list[Measurement] = []
    for phase, layout in extent.draw():
        progress()
        if time.perf_counter() - started > extent.budget_s:
            continue
        features = tuple(round(float(value), 3) for value in layout_features(layout))
        for strategy, work in promising(strategies, phase, layout, estimate, extent.longest_s):
            measured.append(
                Measurement(
                    phase=phase,
                    kernel=strategy.kernel,
                    features=features,
                    work=work,
                    cost=rig.measure(strategy, layout),
                )
            )
    return measured


def promising(
    strategies: Sequence[Strategy],
    phase: Phase,
    layout: AttentionLayout,
    estimate: Callable[[Work], float],
    longest_s: float,
) -> list[tuple[Strategy, Work]]:
    """Those that take the layout and are not hopeless; torch's only where nothing else is."""
    works = [
        (strategy, strategy.work(layout))
        for strategy in strategies
        if strategy.phase is phase and strategy.refusal(layout) is None
    ]
    faster = [found for found in works if any(p.engine != TORCH for p in found[1].parts)]
    estimated = [(estimate(work), strategy, work) for strategy, work in faster or works]
    least = min((seconds for seconds, _, _ in estimated), default=0.0)
    limit = min(HOPELESS * least, longest_s)
    return [(strategy, work) for seconds, strategy, work in estimated if seconds <= limit]
