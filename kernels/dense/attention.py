"""Cascade and split prefill by the dense kernel: a launch a stage, whatever the forest."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.c_library import CLibraryError
from stemserve.kernels.dense.launch import (
    STAGES,
    DenseLauncher,
    DeviceTiles,
    Matrix,
    Sources,
)
from stemserve.kernels.dense.native import NativeDense
from stemserve.kernels.dense.packed import PackedPlan, PackedStage, pack
from stemserve.kernels.dense.plan import DenseHost
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.merge import RowMerge
from stemserve.kernels.page_gather import TokenCopy, TokenScratch
from stemserve.kernels.strategy import Kernel, LayerKVs, Phase, Work

log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = 9  # major: the kernel's instructions are Hopper's alone
SCRATCH_BYTES = 1 << 30  # of copied K and V; what would copy more is refused
PLANS_KEPT = 32  # tables of 10 to 500 KiB each
MOST_STREAMS = 1024  # tiles of so many prefixes are hardly filled, and planning them takes long

Shape = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseStage:
    tiles: DeviceTiles
    merge: RowMerge | None  # None: no tile is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlan:
    packed: PackedPlan
    stages: list[DenseStage]
    copy: TokenCopy | None
    partial_rows: int

    @property
    def work(self) -> Work:
        return self.packed.work


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayers:
    """Attention of a step's layers. Launches may know of tensors by their addresses only."""

    plan: DensePlan
    matrices: Sequence[Matrix]
    target: AttentionState
    kv: LayerKVs
    launches: Sequence[Callable[[], None]]

    def __call__(self, layer: int) -> None:
        if self.plan.copy is not None:
            self.plan.copy.run(self.kv(layer))
        for launch in self.launches:
            launch()


class Launcher(Protocol):
    """See DenseLauncher."""

    processors: int
    fallbacks: Counter[str]

    def launch(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> None: ...

    def bound(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> Callable[[], None]: ...


class DenseAttention:
    """Every tile of rows reads, from their root on, the runs of tokens that its rows share."""

    phase = Phase.PREFILL

    def __init__(
        self, kernel: Kernel, shape: HeadShape, launcher: Launcher, scratch: TokenScratch
    ) -> None:
        self.kernel = kernel
        self._device = scratch.device
        self._shape = shape
        self._scratch = scratch
        self._launcher = launcher
        self.fallbacks = launcher.fallbacks
        ctas = launcher.processors
        self._host = DenseHost(kernel=kernel, query_heads=shape.query_heads, ctas=ctas)
        self._kept: dict[Shape, DensePlan] = {}
        packs = kernel is Kernel.CASCADE  # all that the planner in C does
        self._native = _native(shape, ctas) if packs else None

    def refusal(self, layout: AttentionLayout) -> str | None:
        if layout.num_nodes >= MOST_STREAMS:  # and one more without stored tokens
            nodes = np.unique(layout.segment_node[layout.segment_rows > 0])
            if len(nodes) > MOST_STREAMS:
                return f"the rows are below {len(nodes)} nodes, the limit is {MOST_STREAMS}"
        tokens = int(layout.node_tokens.sum(dtype=np.int64))
        limit = self._scratch.max_tokens
        copied = f"{tokens} tokens would be copied, the limit is {limit}"
        return copied if tokens + 128 * layout.num_nodes > limit else None

    def work(self, layout: AttentionLayout) -> Work:
        return self._packed(layout).work

    def plan(self, layout: AttentionLayout) -> DensePlan:
        """A plan without a copy reads the step's own rows only, whatever pages there are, and is
        kept for the next layout of the same shape."""
        shape = _shape_of(layout)
        plan = self._kept.pop(shape, None) or self._new_plan(layout)
        if plan.copy is None:
            if len(self._kept) >= PLANS_KEPT:
                del self._kept[next(iter(self._kept))]  # the one that was not used for longest
            self._kept[shape] = plan
        return plan

    def _new_plan(self, layout: AttentionLayout) -> DensePlan:
        packed = self._packed(layout)
        joined = device_tensor(packed.joined, self._device)
        copy = None
        if packed.sources.shape[0]:
            sources = packed.sources.flat(joined)
            copy = TokenCopy(sources, *self._scratch.tokens(len(sources)))
        return DensePlan(
            packed=packed,
            stages=[self._stage(packed, stage, joined) for stage in packed.stages],
            copy=copy,
            partial_rows=packed.partial_rows,
        )

    def run(self, plan: DensePlan, q: Tensor, kv: LayerKV) -> AttentionState:
        rows, heads, dim = q.shape
        target = self._target(q, q.new_empty(rows + plan.partial_rows, heads, dim))
        self._launch(plan, self._sources(plan, q, kv).matrices(), kv, target)
        if not plan.partial_rows:
            return target
        return AttentionState(target.out[:rows], target.lse[:rows])

    def bound(self, plan: DensePlan, q: Tensor, kv: LayerKVs, out: Tensor) -> Callable[[int], None]:
        """Partial results go behind the rows, where there is room."""

        if len(q) + plan.partial_rows > len(out):
            return partial(self._run_apart, plan, q, kv, out)
        target = self._target(q, out)
        matrices = self._sources(plan, q, kv(0)).matrices()
        launches: list[Callable[[], None]] = []
        for stage in plan.stages:
            launches.append(self._launcher.bound(stage.tiles, matrices, target))
            if stage.merge is not None:
                launches.append(partial(stage.merge.run, target, target))
        return DenseLayers(plan=plan, matrices=matrices, target=target, kv=kv, launches=launches)

    def _run_apart(self, plan: DensePlan, q: Tensor, kv: LayerKVs, out: Tensor, layer: int) -> None:
        out[: len(q)].copy_(self.run(plan, q, kv(layer)).out)

    def _target(self, q: Tensor, out: Tensor) -> AttentionState:
        return AttentionState(out, q.new_empty(len(out), q.shape[1], dtype=torch.float32))

    def _sources(self, plan: DensePlan, q: Tensor, kv: LayerKV) -> Sources:
        if plan.copy is None:
            return Sources(q, kv.k_rows, kv.v_rows, kv.k_rows, kv.v_rows)  # never read
        return Sources(q, kv.k_rows, kv.v_rows, plan.copy.k, plan.copy.v)

    def _launch(
        self, plan: DensePlan, matrices: Sequence[Matrix], kv: LayerKV, target: AttentionState
    ) -> None:
        if plan.copy is not None:
            plan.copy.run(kv)
        for stage in plan.stages:
            self._launcher.launch(stage.tiles, matrices, target)
            if stage.merge is not None:
                stage.merge.run(target, target)

    def _packed(self, layout: AttentionLayout) -> PackedPlan:
        if self._native is not None:
            return self._native.plan(layout)
        return pack(self._host.plan(layout), self._shape.query_heads, self._launcher.processors)

    def _stage(self, packed: PackedPlan, stage: PackedStage, joined: Tensor) -> DenseStage:
        tiles = DeviceTiles(
            items=stage.items.device(joined),
            blocks=stage.blocks.flat(joined),
            row_first=packed.row_first.flat(joined),
            row_seen=packed.row_seen.flat(joined),
        )
        merge = None
        if stage.targets.shape[0]:
            parts, targets = stage.parts.device(joined), stage.targets.device(joined)
            merge = RowMerge(self._shape, parts, targets)
        return DenseStage(tiles=tiles, merge=merge)


def _shape_of(layout: AttentionLayout) -> Shape:
    """All of a layout but its pages."""
    nodes = (layout.node_parent, layout.node_tokens)
    segments = (layout.segment_indptr, layout.segment_node, layout.segment_is_item)
    return tuple(array.tobytes() for array in (*nodes, *segments))


def _native(shape: HeadShape, ctas: int) -> NativeDense | None:
    """None, with a warning, where its library cannot be made."""
    try:
        return NativeDense(shape.query_heads, ctas)
    except CLibraryError as error:
        log.warning("prefill is planned in numpy, several times slower: %s", error)
        return None


def dense_strategies(
    shape: HeadShape, device: torch.device, dtype: torch.dtype
) -> list[DenseAttention]:
    """None where the kernel does not run."""
    cuda: Any = torch.cuda  # partly untyped
    major: int = cuda.get_device_properties(device).major
    if major != CAPABILITY or dtype not in DTYPES or shape.head_dim not in STAGES:
        return []
    if shape.scale <= 0:  # the kernel takes its maximum before scaling
        return []
    token_bytes = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    scratch = TokenScratch(shape, device, dtype, max_tokens=SCRATCH_BYTES // token_bytes)
    launcher = DenseLauncher(shape, device)
    kernels = (Kernel.CASCADE, Kernel.SPLIT)
    return [DenseAttention(kernel, shape, launcher, scratch) for kernel in kernels]
