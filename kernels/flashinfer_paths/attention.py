"""Strategies that are one batch of FlashInfer, over the pool's pages or over a copy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.flashinfer_paths.backends import Backend
from stemserve.kernels.flashinfer_paths.costs import GATHER, fa2_engine
from stemserve.kernels.flashinfer_paths.prefill import LN2, PlannedPrefill
from stemserve.kernels.flashinfer_paths.prefill_batch import BatchTables
from stemserve.kernels.flashinfer_paths.runtime import FlashInferRuntime
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.page_gather import TokenCopy
from stemserve.kernels.strategy import Kernel, Part, Phase, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedKeys:
    """A copy in a scratch that all layers share, as the kernel reads it: in pages or not."""

    copy: TokenCopy
    k: Tensor  # [tokens, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim]
    v: Tensor  # as k


@dataclass(frozen=True, kw_only=True)
class FlashInferPlan:
    work: Work
    num_rows: int
    prefill: PlannedPrefill | None  # None: no row sees anything
    keys: CopiedKeys | None  # None: the pool's pages are read
    row_order: Tensor | None  # [rows] layout rows in the order of the batch; None: the same
    row_place: Tensor | None  # the inverse
    empty_rows: Tensor | None  # the layout's rows that see nothing; None: there are none


class FlashInferAttention(ABC):
    """Subclasses turn a layout into a batch; this one chooses its backend and runs it."""

    kernel: Kernel
    phase: Phase

    def __init__(self, runtime: FlashInferRuntime) -> None:
        self._runtime = runtime
        self._backends = runtime.backends

    @abstractmethod
    def refusal(self, layout: AttentionLayout) -> str | None: ...

    @abstractmethod
    def tables(self, layout: AttentionLayout) -> BatchTables: ...

    def outline(self, layout: AttentionLayout) -> BatchTables:
        """Tables of the same sizes, whose contents may be anything: what the work follows from."""
        return self.tables(layout)

    def blocks(self, layout: AttentionLayout, tables: BatchTables) -> tuple[Int32, Int32]:
        """Rows and tokens of the blocks that the engine computes: as a rule the requests."""
        return tables.batch.rows, tables.batch.kv_tokens

    def work(self, layout: AttentionLayout) -> Work:
        return self._choose(layout, self.outline(layout))[1]

    def plan(self, layout: AttentionLayout) -> FlashInferPlan:
        return self.plan_tables(layout, self.tables(layout))

    def plan_tables(self, layout: AttentionLayout, tables: BatchTables) -> FlashInferPlan:
        device, order, empty = self._runtime.device, tables.row_order, tables.empty_rows
        backend, work = self._choose(layout, tables)
        sees = bool(tables.batch.kv_tokens.any())
        return FlashInferPlan(
            work=work,
            num_rows=layout.num_rows,
            prefill=self._runtime.prefill.plan(tables.batch, backend, device) if sees else None,
            keys=self._keys(tables) if sees else None,
            row_order=None if order is None else index_tensor(order, device),
            row_place=None if order is None else index_tensor(order.argsort(), device),
            empty_rows=index_tensor(empty, device) if len(empty) else None,
        )

    def run(self, plan: FlashInferPlan, q: Tensor, kv: LayerKV) -> AttentionState:
        if plan.prefill is None:
            return _nothing_seen(q)
        ordered = q if plan.row_order is None else q.index_select(0, plan.row_order)
        k, v = kv.k_pages, kv.v_pages
        if plan.keys is not None:
            plan.keys.copy.run(kv)
            k, v = plan.keys.k, plan.keys.v
        out, lse = self._runtime.prefill.run(plan.prefill, ordered, k, v)
        if plan.row_place is not None:
            out, lse = out.index_select(0, plan.row_place), lse.index_select(0, plan.row_place)
        lse.mul_(LN2)
        if plan.empty_rows is not None:
            out.index_fill_(0, plan.empty_rows, 0.0)
            lse.index_fill_(0, plan.empty_rows, -torch.inf)
        return AttentionState(out, lse)

    def _keys(self, tables: BatchTables) -> CopiedKeys | None:
        if tables.sources is None:
            return None
        k, v = self._runtime.scratch.tokens(len(tables.sources))
        copy = TokenCopy(device_tensor(tables.sources, self._runtime.device), k, v)
        if tables.batch.pages is None:
            return CopiedKeys(copy=copy, k=k, v=v)
        paged = (-1, tables.batch.page_size, *k.shape[1:])
        return CopiedKeys(copy=copy, k=k.view(paged), v=v.view(paged))

    def _choose(self, layout: AttentionLayout, tables: BatchTables) -> tuple[Backend, Work]:
        works = [(backend, self._work(layout, tables, backend)) for backend in self._backends]
        if len(works) == 1:
            return works[0]

        def seconds(option: tuple[Backend, Work]) -> tuple[float, float]:
            costs = self._runtime.costs
            cost = costs.strategy_cost(self.phase, self.kernel, layout, option[1])
            return cost.seconds, cost.device_seconds  # short ones all take the host's time

        return min(works, key=seconds)

    def _work(self, layout: AttentionLayout, tables: BatchTables, backend: Backend) -> Work:
        if not tables.batch.kv_tokens.any():
            return Work(parts=())
        rows, kv_tokens = self.blocks(layout, tables)
        shared = tables.batch.items is not None  # tiles of a request read the same tokens
        part = Part(
            engine=self.engine(tables, backend),
            rows=rows,
            kv_tokens=kv_tokens,
            causal=tables.batch.causal and not shared,
            tokens_once=int(tables.batch.kv_tokens.sum()) if shared else None,
        )
        if tables.sources is None:
            return Work(parts=(part,))
        copied = int32([len(tables.sources)])
        copy = Part(engine=GATHER, rows=int32([0]), kv_tokens=copied)
        return Work(parts=(copy, part))

    def engine(self, tables: BatchTables, backend: Backend) -> str:
        if backend is Backend.FA3:
            return backend.value
        shape = self._runtime.shape
        return fa2_engine(tables.batch.rows, shape.group, shape.head_dim)

    def scratch_refusal(self, tokens: int) -> str | None:
        limit = self._runtime.scratch.max_tokens
        return f"{tokens} tokens would be copied, the limit is {limit}" if tokens > limit else None


def _nothing_seen(q: Tensor) -> AttentionState:
    return AttentionState(
        torch.zeros(q.shape, dtype=q.dtype, device=q.device),
        torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device),
    )
