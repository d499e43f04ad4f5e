"""The choice of a strategy for each attention group, by predicted cost."""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import TORCH, CountsFallbacks, Kernel, Phase, Strategy, Work
from stemserve.proto.v1 import inference_pb2
from stemserve.worker.choice.launch_costs import LaunchCosts, Strategies, StrategyCosts
from stemserve.worker.choice.reason import Fallback, Reason
from stemserve.worker.choice.shape_signature import Signature, signature
from stemserve.worker.steps.layout import (
    AttentionGroup,
    Candidate,
    candidates,
    group,
    part_of,
    sub_layout,
)
from stemserve.worker.steps.step import Step

log = logging.getLogger(__name__)

CHOICES_KEPT = 4096  # shapes whose choice is remembered

KERNEL_CODES: Mapping[Kernel, inference_pb2.Kernel.ValueType] = {
    Kernel.NAIVE: inference_pb2.KERNEL_NAIVE,
    Kernel.SPLIT: inference_pb2.KERNEL_SPLIT,
    Kernel.RAGGED: inference_pb2.KERNEL_RAGGED,
    Kernel.CASCADE: inference_pb2.KERNEL_CASCADE,
    Kernel.MULTI_ITEM: inference_pb2.KERNEL_MULTI_ITEM,
    Kernel.CUSTOM_MASK: inference_pb2.KERNEL_CUSTOM_MASK,
    Kernel.PAGED: inference_pb2.KERNEL_PAGED,
    Kernel.CODEC: inference_pb2.KERNEL_CODEC,
}
KERNELS = {int(code): kernel for kernel, code in KERNEL_CODES.items()}


class NoStrategy(RuntimeError):
    """No strategy takes a group's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a strategy would cost in one layer, or why it cannot run."""

    kernel: Kernel
    cost: Cost
    kv_tokens_read: int
    refusal: str | None
    on_torch: bool = False  # all of it

    @property
    def seconds(self) -> float:
        return self.cost.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    group: AttentionGroup
    strategy: Strategy
    reason: Reason
    fallback: Fallback = Fallback.NONE


class _Verdict(NamedTuple):
    kernel: Kernel
    reason: Reason
    fallback: Fallback = Fallback.NONE


TIE_S = 1e-6  # of a layer: less is no difference
# What predictions of decode cannot tell apart, the tree kernel wins: 136 of 145 trees on an H200.
CLEARLY = 1.08
TREES = Phase.PREFILL  # whose candidates are trees
FREE = (Reason.COST_MODEL, Reason.ONLY)  # nobody forced the kernel


class Dispatcher:
    def __init__(
        self,
        strategies: Strategies,
        costs: StrategyCosts,
        *,
        forced: Kernel | None,
        lacking: str | None = None,
        withheld: Collection[tuple[Phase, Kernel]] = (),
        replayed: Collection[Phase] = (Phase.DECODE,),
        laid_out: bool = False,
    ) -> None:
        """`lacking`: why torch's paths stand in for faster ones; then they are fallbacks.
        `withheld`: strategies that are left out on purpose; to be forced to one is a fallback too.

        `replayed`: phases whose launches a CUDA graph replays, so that the host's time is nothing.
        `laid_out`: strategies that can, lay their launches out once a step; see PlacesResults.
        """
        self._strategies = strategies
        self._costs = LaunchCosts(costs, strategies, replayed=replayed, laid_out=laid_out)
        self._forced = forced
        self._lacking = lacking
        self._withheld = frozenset(withheld)
        self._replayed = frozenset(replayed)
        self._choices: dict[Signature, _Verdict | None] = {}
        self._fallbacks_logged: set[str] = set()
        self._lock = threading.Lock()  # predictions are asked for while steps run
        self.fallbacks = 0
        counting = [of for of in strategies.values() if isinstance(of, CountsFallbacks)]
        self._slow_launches = list({id(of.fallbacks): of.fallbacks for of in counting}.values())

    @property
    def slow_launches(self) -> Counter[str]:
        """Of all strategies, by reason."""
        return sum(self._slow_launches, Counter[str]())

    def choose(self, step: Step) -> list[Choice]:
        """The step's groups: trees with the same verdict are one group."""
        merged: dict[tuple[Phase, _Verdict], list[Candidate]] = {}
        with self._lock:
            for candidate in candidates(step):
                verdict = self._verdict(step.layout, candidate)
                merged.setdefault((candidate.phase, verdict), []).append(candidate)
            return [
                choice
                for (_, verdict), parts in self._together(step, merged).items()
                for choice in self._fit(step, verdict, parts)
            ]

    def predict(self, attention_group: AttentionGroup) -> list[Prediction]:
        """Every strategy of the group's phase: the one to choose, then by cost; refusals last."""
        return self._predictions(attention_group.phase, attention_group.layout)

    def strategy(self, phase: Phase, kernel: Kernel) -> Strategy:
        return self._strategies[phase, kernel]

    def cost(self, choice: Choice, work: Work) -> Cost:
        """Predicted, of one layer."""
        return self._costs.cost(choice.strategy, choice.group.layout, work)

    def _together(
        self, step: Step, apart: dict[tuple[Phase, _Verdict], list[Candidate]]
    ) -> dict[tuple[Phase, _Verdict], list[Candidate]]:
        """All trees of a step with one strategy, if that costs less: launches are paid once."""
        free = {
            key: parts for key, parts in apart.items() if key[1].reason in FREE and key[0] is TREES
        }
        trees = [tree for parts in free.values() for tree in parts]
        if len(trees) < 2:
            return apart
        segments = np.sort(np.concatenate([tree.segments for tree in trees]))
        every = Candidate(phase=TREES, forced=0, segments=segments)
        shape = ("together", *signature(step.layout, every))
        if shape in self._choices:
            verdict = self._choices.pop(shape)
        else:
            verdict = self._cheaper_together(step.layout, every, free)
        self._remember(shape, verdict)
        if verdict is None:
            return apart
        return {key: apart[key] for key in apart if key not in free} | {(TREES, verdict): trees}

    def _cheaper_together(
        self,
        layout: AttentionLayout,
        every: Candidate,
        apart: Mapping[tuple[Phase, _Verdict], list[Candidate]],
    ) -> _Verdict | None:
        total = Cost(0.0, 0.0)
        for (phase, verdict), parts in apart.items():
            segments = np.sort(np.concatenate([part.segments for part in parts]))
            prediction = self._prediction(
                self._strategies[phase, verdict.kernel], sub_layout(layout, segments)
            )
            if prediction.refusal is not None:
                return None
            total += prediction.cost
        best = self._predictions(every.phase, sub_layout(layout, every.segments))[0]
        if best.refusal is not None or best.seconds >= total.seconds:
            return None
        return _Verdict(best.kernel, Reason.COST_MODEL)

    def _fit(self, step: Step, verdict: _Verdict, parts: list[Candidate]) -> Iterator[Choice]:
        """The parts as one group, or as several where a strategy takes one tree at a time only."""
        phase = parts[0].phase
        strategy = self._strategies[phase, verdict.kernel]
        segments = parts[0].segments
        if len(parts) > 1:
            segments = np.sort(np.concatenate([part.segments for part in parts]))
        merged = group(step, phase, segments)
        if strategy.refusal(merged.layout) is None:
            yield self._choice(merged, verdict)
        elif len(parts) > 1:
            for part in parts:
                yield from self._fit(step, verdict, [part])
        else:
            # The verdict was remembered from a similar shape.
            yield self._choice(merged, self._decide(parts[0], merged.layout))

    def _choice(self, attention_group: AttentionGroup, verdict: _Verdict) -> Choice:
        return Choice(
            group=attention_group,
            strategy=self._strategies[attention_group.phase, verdict.kernel],
            reason=verdict.reason,
            fallback=verdict.fallback,
        )

    def _verdict(self, layout: AttentionLayout, candidate: Candidate) -> _Verdict:
        shape = signature(layout, candidate)
        verdict = self._choices.pop(shape, None)
        if verdict is None:
            verdict = self._decide(candidate, part_of(layout, candidate))
        self._remember(shape, verdict)
        if verdict.reason is Reason.FALLBACK:
            self.fallbacks += 1
        return verdict

    def _remember(self, shape: Signature, verdict: _Verdict | None) -> None:
        """At the end: the first of the dict is the least recently used."""
        if len(self._choices) >= CHOICES_KEPT:
            del self._choices[next(iter(self._choices))]
        self._choices[shape] = verdict

    def _decide(self, candidate: Candidate, layout: AttentionLayout) -> _Verdict:
        phase = candidate.phase
        forced = KERNELS.get(candidate.forced, self._forced)
        if forced and (phase, forced) in self._withheld:
            self._log_fallback(forced, "its results depend on the batch")
            return self._instead(phase, layout, Fallback.WITHHELD)
        # A kernel of the other phase leaves this one to the cost model.
        strategy = self._strategies.get((phase, forced)) if forced else None
        if strategy is None:
            return self._cheapest(phase, layout)
        refusal = strategy.refusal(layout)
        if refusal is None:
            return _Verdict(strategy.kernel, Reason.FORCED)
        self._log_fallback(strategy.kernel, refusal)
        return self._instead(phase, layout, Fallback.REFUSED)

    def _instead(self, phase: Phase, layout: AttentionLayout, why: Fallback) -> _Verdict:
        return _Verdict(self._cheapest(phase, layout).kernel, Reason.FALLBACK, why)

    def _cheapest(self, phase: Phase, layout: AttentionLayout) -> _Verdict:
        predictions = self._predictions(phase, layout)
        eligible = [p for p in predictions if p.refusal is None]
        if not eligible:
            refusals = "; ".join(f"{p.kernel}: {p.refusal}" for p in predictions)
            raise NoStrategy(f"no {phase} strategy takes the layout ({refusals or 'none exists'})")
        if self._lacking is not None and eligible[0].on_torch:
            return _Verdict(eligible[0].kernel, Reason.FALLBACK, Fallback.LACKING)
        only = len(eligible) == 1
        return _Verdict(eligible[0].kernel, Reason.ONLY if only else Reason.COST_MODEL)

    def _predictions(self, phase: Phase, layout: AttentionLayout) -> list[Prediction]:
        predictions = [
            self._prediction(strategy, layout)
            for (of_phase, _), strategy in self._strategies.items()
            if of_phase == phase
        ]
        least = min((p.seconds for p in predictions if p.refusal is None), default=0.0)
        doubted = phase is Phase.DECODE and phase in self._replayed

        def order(p: Prediction) -> tuple[bool, bool, float, float]:
            seconds, device_s = p.seconds, p.cost.device_seconds
            if doubted and device_s and p.kernel is not Kernel.CODEC:
                seconds = device_s = CLEARLY * seconds
            # The device's time is what counts where the host runs ahead of it.
            ties = seconds <= least + TIE_S
            return p.refusal is not None, not ties, ties * device_s, seconds

        return sorted(predictions, key=order)

    def _prediction(self, strategy: Strategy, layout: AttentionLayout) -> Prediction:
        refusal = strategy.refusal(layout)
        if refusal is not None:
            return Prediction(
                kernel=strategy.kernel, cost=Cost(0.0, 0.0), kv_tokens_read=0, refusal=refusal
            )
        work = strategy.work(layout)
        return Prediction(
            kernel=strategy.kernel,
            cost=self._costs.cost(strategy, layout, work),
            kv_tokens_read=work.kv_tokens_read,
            refusal=None,
            on_torch=all(part.engine == TORCH for part in work.parts),
        )

    def _log_fallback(self, kernel: Kernel, refusal: str) -> None:
        message = f"forced kernel {kernel} cannot run ({refusal})"
        level = logging.DEBUG if message in self._fallbacks_logged else logging.WARNING
        log.log(level, "%s; the cost model chooses", message)
        if len(self._fallbacks_logged) < CHOICES_KEPT:
            self._fallbacks_logged.add(message)
