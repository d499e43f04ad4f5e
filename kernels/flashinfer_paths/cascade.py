"""Cascade decode on FlashInfer: a batch for each level of the forest, and one merge."""

from dataclasses import dataclass

from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.flashinfer_paths.backends import Backend
from stemserve.kernels.flashinfer_paths.cascade_levels import CascadeLevels, cascade_levels
from stemserve.kernels.flashinfer_paths.costs import MERGE, fa2_engine
from stemserve.kernels.flashinfer_paths.level_merge import MAX_LEVELS, LevelMerge, LevelParts
from stemserve.kernels.flashinfer_paths.prefill import PlannedPrefill
from stemserve.kernels.flashinfer_paths.runtime import FlashInferRuntime
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, int32
from stemserve.kernels.strategy import Kernel, Part, Phase, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLevel:
    rows: slice  # in depth-first order
    prefill: PlannedPrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferCascadePlan:
    work: Work
    levels: list[PlannedLevel]
    row_order: Tensor | None  # None: rows are in depth-first order already
    merge: LevelMerge


class FlashInferCascadeDecode:
    """Levels are built by hand: FlashInfer's own cascade names no backend, and takes fa3, which
    is several times slower for single rows. Its merge knows no row that sees nothing either.
    """

    kernel = Kernel.CASCADE
    phase = Phase.DECODE

    def __init__(self, runtime: FlashInferRuntime) -> None:
        self._runtime = runtime

    def refusal(self, layout: AttentionLayout) -> str | None:
        refused = decode_refusal(layout)
        if refused is None and len(cascade_levels(layout).levels) > MAX_LEVELS:
            return f"the forest has more than {MAX_LEVELS} levels"
        return refused

    def work(self, layout: AttentionLayout) -> Work:
        return self._work(cascade_levels(layout))

    def plan(self, layout: AttentionLayout) -> FlashInferCascadePlan:
        cascade, device = cascade_levels(layout), self._runtime.device
        prefill = self._runtime.prefill
        return FlashInferCascadePlan(
            work=self._work(cascade),
            levels=[
                PlannedLevel(
                    rows=slice(level.row_start, level.row_stop),
                    prefill=prefill.plan(level.batch, Backend.FA2, device),
                )
                for level in cascade.levels
            ],
            row_order=None if cascade.in_order else index_tensor(cascade.row_order, device),
            merge=LevelMerge(
                len(cascade.levels),
                device_tensor(cascade.seen, device),
                device_tensor(cascade.row_order, device),
                self._runtime.shape.query_heads,
                self._runtime.shape.head_dim,
            ),
        )

    def run(self, plan: FlashInferCascadePlan, q: Tensor, kv: LayerKV) -> AttentionState:
        ordered = q if plan.row_order is None else q.index_select(0, plan.row_order)
        parts = LevelParts.empty(len(plan.levels), q)
        for i, level in enumerate(plan.levels):
            self._runtime.prefill.run(
                level.prefill,
                ordered[level.rows],
                kv.k_pages,
                kv.v_pages,
                into=AttentionState(parts.outs[i, level.rows], parts.lses[i, level.rows]),
            )
        return plan.merge.run(parts)

    def _work(self, cascade: CascadeLevels) -> Work:
        shape, parts = self._runtime.shape, list[Part]()
        for level in cascade.levels:
            rows = level.batch.rows
            engine = fa2_engine(rows, shape.group, shape.head_dim)
            parts.append(Part(engine=engine, rows=rows, kv_tokens=level.batch.kv_tokens))
        merged_rows = int32([sum(level.row_stop - level.row_start for level in cascade.levels)])
        parts.append(Part(engine=MERGE, rows=merged_rows, kv_tokens=int32([0])))
        return Work(parts=tuple(parts))
