"""Prefill by the tree kernel with fixed splits: a row's bits are the same in every batch.

Items go through scratch pages (item_pages), so that a row's result is also the same whether it is
an item's, a stored chunk's or a decode row's.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodePlan
from stemserve.kernels.fixed.item_pages import PagedItems, paged_items
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.page_gather import TokenCopy, TokenScratch
from stemserve.kernels.strategy import Kernel, Part, Phase, Work

MAX_SCRATCH_TOKENS = 1 << 24  # what the tree kernel can number


@dataclass(frozen=True, kw_only=True)
class FixedTreePlan:
    tree: DecodePlan
    copy: TokenCopy | None  # None: no items
    work: Work


class FixedTree:
    kernel = Kernel.CODEC
    phase = Phase.PREFILL

    def __init__(self, tree: CodecDecode) -> None:
        if tree.phase is not Phase.PREFILL or not tree.division.fixed_split:
            raise ValueError("the tree kernel must be one for prefill with fixed splits")
        self._tree = tree
        self._scratch = TokenScratch(
            tree.shape, tree.device, tree.numbers.dtype, max_tokens=MAX_SCRATCH_TOKENS
        )
        self._last: tuple[AttentionLayout, PagedItems] | None = None

    def refusal(self, layout: AttentionLayout) -> str | None:
        return self._tree.refusal(layout)

    def work(self, layout: AttentionLayout) -> Work:
        items = self._paged(layout)
        return _with_copy(self._tree.work(items.layout), items)

    def plan(self, layout: AttentionLayout) -> FixedTreePlan:
        items = self._paged(layout)
        self._last = None
        tree = self._tree.plan(items.layout)
        copy = None
        if len(items.sources):
            sources = device_tensor(items.sources, self._tree.device)
            copy = TokenCopy(sources, *self._scratch.tokens(len(items.sources)))
        return FixedTreePlan(tree=tree, copy=copy, work=_with_copy(tree.work, items))

    def run(self, plan: FixedTreePlan, q: Tensor, kv: LayerKV) -> AttentionState:
        if plan.copy is not None:
            plan.copy.run(kv)
            kv = kv._replace(k_rows=plan.copy.k, v_rows=plan.copy.v)
        return self._tree.run(plan.tree, q, kv)

    def _paged(self, layout: AttentionLayout) -> PagedItems:
        """Of a layout that may have been asked for its work just now, by another thread too."""
        last = self._last
        if last is None or last[0] is not layout:
            last = self._last = layout, paged_items(layout)
        return last[1]


def _with_copy(work: Work, items: PagedItems) -> Work:
    if not len(items.sources):
        return work
    tokens = np.array([len(items.sources)], np.int32)
    copied = Part(engine="gather", rows=np.zeros(1, np.int32), kv_tokens=tokens)
    return replace(work, parts=(copied, *work.parts))
