"""Strategies with price lists of their own, to dispatch between."""

from dataclasses import dataclass

from tests.worker.plans import PlanBuilder
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout, int32
from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import TORCH, Kernel, Part, Phase, Strategy, Work
from stemserve.worker.choice.dispatch import Choice
from stemserve.worker.choice.reason import Reason
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.step import Step, decode_step

LIMITS = StepLimits(
    vocab_size=50,
    context_tokens=100_000,
    page_size=4,
    kv_pages=100_000,
    sampler_slots=4,
    max_step_tokens=10_000,
    has_lm_head=True,
    classes=0,
)


@dataclass(kw_only=True)
class Toy:
    """A strategy with a price list of its own; it counts how often it is asked."""

    kernel: Kernel
    phase: Phase
    seconds_a_token: float
    refuses_more_segments_than: int = 10**9
    asked: int = 0

    def refusal(self, layout: AttentionLayout) -> str | None:
        if layout.num_segments > self.refuses_more_segments_than:
            return f"more than {self.refuses_more_segments_than} segments"
        return None

    def work(self, layout: AttentionLayout) -> Work:
        self.asked += 1
        tokens = int(layout.chain_tokens.sum() * self.seconds_a_token)
        part = Part(engine=TORCH, rows=int32([1]), kv_tokens=int32([tokens]))
        return Work(parts=(part,))

    def plan(self, layout: AttentionLayout) -> Work:
        return self.work(layout)

    def run(self, plan: Work, q: Tensor, kv: LayerKV) -> AttentionState:
        raise RuntimeError("toys only have a price")


class TokenCosts:
    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost:
        return Cost(0.0, float(work.kv_tokens_read))


def toys(*some: Toy) -> dict[tuple[Phase, Kernel], Strategy]:
    return {(toy.phase, toy.kernel): toy for toy in some}


def two_trees(kernel: int = 0) -> Step:
    plan = PlanBuilder()
    plan.prefill(plan.node(8, [0, 1]), [1, 2], kernel=kernel)
    plan.prefill(plan.node(12, [2, 3, 4]), [1, 2], kernel=kernel)
    return decode_step(plan.build(), LIMITS)


def naive_and_split(refuses_more_segments_than: int = 10**9) -> tuple[Toy, Toy]:
    split = Toy(
        kernel=Kernel.SPLIT,
        phase=Phase.PREFILL,
        seconds_a_token=1,
        refuses_more_segments_than=refuses_more_segments_than,
    )
    return Toy(kernel=Kernel.NAIVE, phase=Phase.PREFILL, seconds_a_token=2), split


def summary(choices: list[Choice]) -> list[tuple[Kernel, Reason, int]]:
    return [(c.strategy.kernel, c.reason, c.group.layout.num_segments) for c in choices]
