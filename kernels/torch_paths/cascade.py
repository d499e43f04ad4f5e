"""Cascade attention: every run of shared tokens is read once by all rows below it."""

import numpy as np
import torch

from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.prefix_forest import PrefixForest, PrefixRun, prefix_forest
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.calls import (
    Call,
    PageTokens,
    batch_page_calls,
    dense_call,
    own_row_calls,
)
from stemserve.kernels.torch_paths.schedule import Schedule, ScheduledAttention, Stage


class CascadeAttention(ScheduledAttention):
    """A stage for each level of the forest, and one for the items' own rows.

    Hydragen (arXiv 2402.05099) and RelayAttention (arXiv 2402.14808) do so for one shared prefix,
    FlashInfer's cascade for prefixes in levels.
    """

    kernel = Kernel.CASCADE

    def __init__(self, shape: HeadShape, device: torch.device, phase: Phase) -> None:
        super().__init__(shape, device)
        self.phase = phase

    def refusal(self, layout: AttentionLayout) -> str | None:
        return decode_refusal(layout) if self.phase is Phase.DECODE else None

    def schedule(self, layout: AttentionLayout) -> Schedule:
        forest = prefix_forest(layout)
        stages = cascade_stages(forest, layout.page_size)
        items = np.flatnonzero(layout.segment_is_item & (layout.segment_rows > 0))
        first = layout.segment_indptr[items]
        own = own_row_calls(forest.row_place[first], layout.segment_rows[items], first)
        return Schedule(
            num_rows=layout.num_rows,
            stages=[*stages, own],
            row_order=None if forest.in_order else forest.row_order,
            row_place=None if forest.in_order else forest.row_place,
        )


def cascade_stages(forest: PrefixForest, page_size: int) -> list[Stage]:
    """Two stages a level: what all rows of a run see whole, then where some of them end in it."""
    levels = 1 + max((run.depth for run in forest.runs), default=-1)
    stages: list[Stage] = [[] for _ in range(2 * levels)]
    for run in forest.runs:
        if run.whole_tokens:
            tokens = PageTokens(
                pages=run.pages, start=0, tokens=run.whole_tokens, page_size=page_size
            )
            stages[2 * run.depth].append(dense_call(run.row_start, run.rows, tokens))
        if len(run.partial_visible):
            stages[2 * run.depth + 1].append(_partial_call(run, page_size))
    return [batch_page_calls(stage) for stage in stages]


def _partial_call(run: PrefixRun, page_size: int) -> Call:
    whole = run.whole_tokens
    tokens = PageTokens(
        pages=run.pages, start=whole, tokens=run.tokens - whole, page_size=page_size
    )
    visible = np.full(run.rows, run.tokens - whole, np.int32)
    visible[: len(run.partial_visible)] = run.partial_visible - whole
    return Call(
        row_start=int32([run.row_start]),
        rows=int32([run.rows]),
        tokens=tokens,
        causal=run.is_staircase,
        visible=None if run.is_staircase else visible,
    )
