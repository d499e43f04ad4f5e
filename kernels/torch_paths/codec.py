"""CoDec tree decode: partial attention over cost-balanced tasks, then a reduction in tree order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV, merge_states
from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.prefix_forest import PrefixForest, prefix_forest
from stemserve.kernels.pricing.cost_model import Costs
from stemserve.kernels.strategy import Kernel, Phase, Work
from stemserve.kernels.torch_paths.calls import Call, PageTokens, batch_page_calls, call_work
from stemserve.kernels.torch_paths.codec_plan import (
    CodecLimits,
    TaskList,
    divide,
    partial_starts,
    reduction_table,
)
from stemserve.kernels.torch_paths.device_call import DeviceCall, FlatKV, device_call
from stemserve.kernels.torch_paths.schedule import empty_state, store


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecPlan:
    work: Work
    tasks: TaskList
    calls: list[DeviceCall]
    num_partials: int
    row_order: Tensor | None  # [rows] layout rows in depth-first order; None: they are
    reduction: Tensor  # [parts, rows] partial results of each row of the layout


class CodecAttention:
    """PAC (partial attention) and POR (its reduction) of CoDec, arXiv 2505.17694, over any tree."""

    kernel = Kernel.CODEC
    phase = Phase.DECODE

    def __init__(
        self, shape: HeadShape, device: torch.device, costs: Costs, limits: CodecLimits
    ) -> None:
        self._shape = shape
        self._device = device
        self._costs = costs
        self._limits = limits

    def refusal(self, layout: AttentionLayout) -> str | None:
        return decode_refusal(layout)

    def work(self, layout: AttentionLayout) -> Work:
        forest = prefix_forest(layout)
        tasks = divide(forest, self._costs, self._limits)
        return call_work(task_calls(forest, tasks, layout.page_size))

    def plan(self, layout: AttentionLayout) -> CodecPlan:
        forest = prefix_forest(layout)
        tasks = divide(forest, self._costs, self._limits)
        calls = task_calls(forest, tasks, layout.page_size)
        partials = int(tasks.rows.sum())
        reduction = reduction_table(tasks, layout.num_rows, padding=partials + 1)
        order = None if forest.in_order else index_tensor(forest.row_order, self._device)
        return CodecPlan(
            work=call_work(calls),
            tasks=tasks,
            calls=[device_call(call, 0, partials, self._device) for call in calls],
            num_partials=partials,
            row_order=order,
            reduction=index_tensor(reduction[:, forest.row_place], self._device),
        )

    def run(self, plan: CodecPlan, q: Tensor, kv: LayerKV) -> AttentionState:
        ordered = q if plan.row_order is None else q.index_select(0, plan.row_order)
        flat = FlatKV.of_layer(kv)
        # Padded rows of calls are written after the last partial; the row after that stays empty.
        partial = empty_state(plan.num_partials + 2, q)
        for call in plan.calls:
            store(partial, call, call.attend(ordered, flat, self._shape))
        return self._reduce(plan, q, partial)

    def _reduce(self, plan: CodecPlan, q: Tensor, partial: AttentionState) -> AttentionState:
        if not plan.calls:
            out, lse = empty_state(len(q), q)
            return AttentionState(out.to(q.dtype), lse)
        out, lse = merge_states(partial.out[plan.reduction], partial.lse[plan.reduction])
        return AttentionState(out.to(q.dtype), lse)


def task_calls(forest: PrefixForest, tasks: TaskList, page_size: int) -> list[Call]:
    starts = partial_starts(tasks)
    calls: list[Call] = []
    for task in range(tasks.num_tasks):
        tokens = PageTokens(
            pages=forest.runs[int(tasks.run[task])].pages,
            start=int(tasks.token_start[task]),
            tokens=int(tasks.tokens[task]),
            page_size=page_size,
        )
        one = slice(task, task + 1)
        calls.append(
            Call(
                row_start=tasks.row_start[one],
                target_start=starts[one],
                rows=tasks.rows[one],
                tokens=tokens,
            )
        )
    return batch_page_calls(calls)
