"""Cascade and split prefill by the dense kernel: a launch a stage, whatever the forest."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.dense.dense_launch import STAGES, DenseLauncher, DeviceTiles, Sources
from stemserve.kernels.dense.dense_native import NativeDense
from stemserve.kernels.dense.dense_packed import PackedPlan, PackedStage, pack
from stemserve.kernels.dense.dense_plan import DenseHost
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.merge import RowMerge
from stemserve.kernels.page_gather import TokenCopy, TokenScratch
from stemserve.kernels.strategy import Kernel, Phase, Work

DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = 9  # major: the kernel's instructions are Hopper's alone
SCRATCH_BYTES = 1 << 30  # of copied K and V; what would copy more is refused
MOST_STREAMS = 1024  # tiles of so many prefixes are hardly filled, and planning them takes long


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseStage:
    tiles: DeviceTiles
    merge: RowMerge | None  # None: no tile is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlan:
    work: Work
    stages: list[DenseStage]
    copy: TokenCopy | None
    partial_rows: int


class DenseAttention:
    """Every tile of rows reads, from their root on, the runs of tokens that its rows share."""

    phase = Phase.PREFILL

    def __init__(
        self, kernel: Kernel, shape: HeadShape, device: torch.device, scratch: TokenScratch
    ) -> None:
        self.kernel = kernel
        self._device = device
        self._shape = shape
        self._scratch = scratch
        self._launcher = DenseLauncher(shape, device)
        ctas = self._launcher.processors
        self._host = DenseHost(kernel=kernel, query_heads=shape.query_heads, ctas=ctas)
        packs = kernel is Kernel.CASCADE  # all that the planner in C does
        self._native = NativeDense(shape.query_heads, ctas) if packs else None

    def refusal(self, layout: AttentionLayout) -> str | None:
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
        packed = self._packed(layout)
        joined = device_tensor(packed.joined, self._device)
        sources = packed.sources.device(joined)
        copy = None
        if len(sources):
            copy = TokenCopy(sources, *self._scratch.tokens(len(sources)))
        return DensePlan(
            work=packed.work,
            stages=[self._stage(packed, stage, joined) for stage in packed.stages],
            copy=copy,
            partial_rows=packed.partial_rows,
        )

    def run(self, plan: DensePlan, q: Tensor, kv: LayerKV) -> AttentionState:
        rows, heads, dim = q.shape
        written = rows + plan.partial_rows
        target = AttentionState(
            q.new_empty(written, heads, dim), q.new_empty(written, heads, dtype=torch.float32)
        )
        copies = (kv.k_rows, kv.v_rows)  # never read
        if plan.copy is not None:
            copies = (plan.copy.k, plan.copy.v)
            plan.copy.run(kv)
        sources = Sources(q, kv.k_rows, kv.v_rows, *copies)
        for stage in plan.stages:
            self._launcher.launch(stage.tiles, sources, target)
            if stage.merge is not None:
                stage.merge.run(target, target)
        if not plan.partial_rows:
            return target
        return AttentionState(target.out[:rows], target.lse[:rows])

    def _packed(self, layout: AttentionLayout) -> PackedPlan:
        if self._native is not None:
            return self._native.plan(layout)
        return pack(self._host.plan(layout), self._shape.query_heads, self._launcher.processors)

    def _stage(self, packed: PackedPlan, stage: PackedStage, joined: Tensor) -> DenseStage:
        tiles = DeviceTiles(
            items=stage.items.device(joined),
            blocks=stage.blocks.device(joined),
            row_first=packed.row_first.device(joined),
            row_seen=packed.row_seen.device(joined),
        )
        merge = None
        if stage.targets.shape[0]:
            parts, targets = stage.parts.device(joined), stage.targets.device(joined)
            merge = RowMerge(self._shape, parts, targets)
        return DenseStage(tiles=tiles, merge=merge)


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
    return [
        DenseAttention(kernel, shape, device, scratch) for kernel in (Kernel.CASCADE, Kernel.SPLIT)
    ]
