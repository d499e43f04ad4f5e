"""Which plans of the dense kernel are kept, and for whom."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.forests import Node, Segment, head_shape, make_layout

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.dense.attention import PLANS_KEPT, DenseAttention
from stemserve.kernels.dense.launch import DeviceTiles, Matrix
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.page_gather import TokenScratch
from stemserve.kernels.strategy import Kernel

CPU = torch.device("cpu")
SHAPE = head_shape(4, 2, 64)


class NoLaunches:
    """Of a device that is only planned for."""

    processors = 7

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()

    def launch(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> None:
        raise RuntimeError("there is no device")

    def bound(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> Callable[[], None]:
        raise RuntimeError("there is no device")


def strategy(kernel: Kernel = Kernel.CASCADE) -> DenseAttention:
    scratch = TokenScratch(SHAPE, CPU, torch.float16, max_tokens=1 << 16)
    return DenseAttention(kernel, SHAPE, NoLaunches(), scratch)


def cold(tokens: int, items: int = 3) -> AttentionLayout:
    """A prompt that is computed with items below it: nothing is read from pages."""
    segments = [Segment(rows=tokens), *[Segment(rows=4, is_item=True)] * items]
    return make_layout([Node(tokens=tokens)], segments)


def cached(tokens: int) -> AttentionLayout:
    return make_layout([Node(tokens=tokens)], [Segment(rows=4, is_item=True)] * 3)


@pytest.mark.parametrize("kernel", [Kernel.CASCADE, Kernel.SPLIT])
def test_a_shape_that_comes_again_has_its_plan_already_whatever_its_pages(kernel: Kernel) -> None:
    known, layout = strategy(kernel), cold(300)
    plan = known.plan(layout)
    elsewhere = replace(layout, node_pages=layout.node_pages[::-1].copy() + np.int32(5))
    assert known.plan(elsewhere) is plan
    fresh = strategy(kernel).plan(elsewhere)
    assert plan.packed.joined.tolist() == fresh.packed.joined.tolist()


def test_another_shape_has_another_plan() -> None:
    known = strategy()
    plans = [known.plan(layout) for layout in (cold(300), cold(301), cold(300, 4), cold(300))]
    assert plans[0] is plans[3]
    assert len({id(plan) for plan in plans}) == 3


def test_what_is_read_from_pages_is_planned_anew() -> None:
    known, layout = strategy(), cached(300)
    plan = known.plan(layout)
    elsewhere = replace(layout, node_pages=layout.node_pages + np.int32(1))
    again = known.plan(elsewhere)
    assert again is not plan
    assert again.packed.joined.tolist() == strategy().plan(elsewhere).packed.joined.tolist()
    assert again.packed.joined.tolist() != plan.packed.joined.tolist()


def test_plans_that_are_not_used_make_room() -> None:
    known = strategy()
    first, second = known.plan(cold(100)), known.plan(cold(101))
    for tokens in range(102, 100 + PLANS_KEPT):
        known.plan(cold(tokens))
    assert known.plan(cold(100)) is first
    known.plan(cold(99))
    assert known.plan(cold(100)) is first
    assert known.plan(cold(101)) is not second
