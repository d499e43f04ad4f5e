"""What decides between strategies: host and device, the trees of a step together or apart."""

from collections.abc import Callable

import pytest
from tests.worker.plans import PlanBuilder
from tests.worker.toy_strategies import LIMITS, Toy, naive_and_split, summary, toys, two_trees
from torch import Tensor

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import Kernel, LayerKVs, Phase, Work
from stemserve.worker.choice.dispatch import Dispatcher
from stemserve.worker.choice.reason import Reason
from stemserve.worker.steps.step import Step, decode_step


def test_of_strategies_that_cost_the_host_alike_the_device_decides() -> None:
    class HostBound:
        def strategy_cost(
            self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
        ) -> Cost:
            return Cost(50e-6, 9e-6) if kernel is Kernel.NAIVE else Cost(51e-6, 4e-6)

    dispatcher = Dispatcher(toys(*naive_and_split()), HostBound(), forced=None)
    assert summary(dispatcher.choose(two_trees())) == [(Kernel.SPLIT, Reason.COST_MODEL, 2)]


@pytest.mark.parametrize(
    ("replayed", "chosen"), [((), Kernel.PAGED), ((Phase.DECODE,), Kernel.CODEC)]
)
def test_the_host_costs_nothing_where_a_graph_is_replayed(
    replayed: tuple[Phase, ...], chosen: Kernel
) -> None:
    class Device:
        def strategy_cost(
            self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
        ) -> Cost:
            return Cost(60e-6, 9e-6) if kernel is Kernel.CODEC else Cost(30e-6, 20e-6)

    both = [
        Toy(kernel=kernel, phase=Phase.DECODE, seconds_a_token=1)
        for kernel in (Kernel.PAGED, Kernel.CODEC)
    ]
    dispatcher = Dispatcher(toys(*both), Device(), forced=None, replayed=replayed)
    plan = PlanBuilder()
    plan.decode(plan.node(8, [0, 1]), 1)
    (choice,) = dispatcher.choose(decode_step(plan.build(), LIMITS))
    assert choice.strategy.kernel is chosen


class Placing(Toy):
    def bound(self, plan: Work, q: Tensor, kv: LayerKVs, out: Tensor) -> Callable[[int], None]:
        raise RuntimeError("toys only have a price")


@pytest.mark.parametrize(("laid_out", "chosen"), [(False, Kernel.SPLIT), (True, Kernel.CASCADE)])
def test_launches_that_are_laid_out_once_a_step_cost_the_host_less(
    laid_out: bool, chosen: Kernel
) -> None:
    class HostBound:
        def strategy_cost(
            self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
        ) -> Cost:
            return Cost(60e-6, 9e-6) if kernel is Kernel.CASCADE else Cost(50e-6, 9e-6)

    both = [
        kind(kernel=kernel, phase=Phase.PREFILL, seconds_a_token=1)
        for kind, kernel in ((Placing, Kernel.CASCADE), (Toy, Kernel.SPLIT))
    ]
    dispatcher = Dispatcher(toys(*both), HostBound(), forced=None, laid_out=laid_out)
    assert summary(dispatcher.choose(two_trees())) == [(chosen, Reason.COST_MODEL, 2)]


@pytest.mark.parametrize(("codec_s", "chosen"), [(52e-6, Kernel.CODEC), (55e-6, Kernel.PAGED)])
def test_the_tree_kernel_decodes_unless_another_is_clearly_faster(
    codec_s: float, chosen: Kernel
) -> None:
    class Near:
        def strategy_cost(
            self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
        ) -> Cost:
            return Cost(60e-6, codec_s if kernel is Kernel.CODEC else 50e-6)

    both = [
        Toy(kernel=kernel, phase=Phase.DECODE, seconds_a_token=1)
        for kernel in (Kernel.PAGED, Kernel.CODEC)
    ]
    plan = PlanBuilder()
    plan.decode(plan.node(8, [0, 1]), 1)
    (choice,) = Dispatcher(toys(*both), Near(), forced=None).choose(
        decode_step(plan.build(), LIMITS)
    )
    assert choice.strategy.kernel is chosen


class Overhead:
    """A call costs 10 whatever it does, a token 1 in `split`, and 2 in `ragged`."""

    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost:
        tokens = work.kv_tokens_read
        return Cost(0.0, tokens if kernel is Kernel.SPLIT else 10.0 + 0.5 * tokens)


def many_trees(count: int) -> Step:
    plan = PlanBuilder()
    for tree in range(count):
        pages = range(2 * tree, 2 * tree + 1 + tree % 2)
        plan.prefill(plan.node(4 * len(pages), pages), [1, 2])
    return decode_step(plan.build(), LIMITS)


def test_trees_that_are_cheaper_with_one_strategy_are_one_group() -> None:
    split = Toy(kernel=Kernel.SPLIT, phase=Phase.PREFILL, seconds_a_token=1)
    ragged = Toy(kernel=Kernel.RAGGED, phase=Phase.PREFILL, seconds_a_token=1)
    dispatcher = Dispatcher(toys(split, ragged), Overhead(), forced=None)
    assert summary(dispatcher.choose(many_trees(1)))[0][0] is Kernel.SPLIT
    for _ in range(2):
        choices = dispatcher.choose(many_trees(12))
        assert summary(choices) == [(Kernel.RAGGED, Reason.COST_MODEL, 12)]
    asked = ragged.asked
    dispatcher.choose(many_trees(12))
    assert ragged.asked == asked


def test_trees_keep_their_own_strategies_where_that_costs_less() -> None:
    class Own(Overhead):
        def strategy_cost(
            self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
        ) -> Cost:
            long = layout.chain_tokens == 8
            wrong = long.sum() if kernel is Kernel.SPLIT else (~long).sum()
            return Cost(0.0, float(layout.num_segments + 100 * wrong))

    split = Toy(kernel=Kernel.SPLIT, phase=Phase.PREFILL, seconds_a_token=1)
    ragged = Toy(kernel=Kernel.RAGGED, phase=Phase.PREFILL, seconds_a_token=1)
    dispatcher = Dispatcher(toys(split, ragged), Own(), forced=None)
    found = summary(dispatcher.choose(many_trees(6)))
    assert sorted(found) == [
        (Kernel.RAGGED, Reason.COST_MODEL, 3),
        (Kernel.SPLIT, Reason.COST_MODEL, 3),
    ]
