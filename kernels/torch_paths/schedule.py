"""Run stages of attention calls and merge the parts that each row gets."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape, Int32
from stemserve.kernels.strategy import Kernel, Phase, Work
from stemserve.kernels.torch_paths.calls import Call, call_work
from stemserve.kernels.torch_paths.device_call import DeviceCall, FlatKV, device_call

Stage = list[Call]  # calls of disjoint rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Each row meets at most one call a stage; its answer is the merge over the stages."""

    num_rows: int
    stages: list[Stage]
    row_order: Int32 | None = None  # [rows] layout rows in the order of the calls; None: the same
    row_place: Int32 | None = None  # the inverse

    @property
    def work(self) -> Work:
        return call_work(call for stage in self.stages for call in stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    calls: list[DeviceCall]
    row_start: int
    row_stop: int
    is_full: bool  # every row of the range meets a call

    @property
    def is_one_range(self) -> bool:
        return len(self.calls) == 1 and self.calls[0].target is None

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    work: Work
    num_rows: int
    stages: list[StagePlan]
    row_order: Tensor | None  # [rows] layout rows in the order of the calls; None: the same
    row_place: Tensor | None  # [rows] the inverse


class ScheduledAttention(ABC):
    """A strategy that is a schedule of calls; subclasses say which calls."""

    kernel: Kernel
    phase: Phase

    def __init__(self, shape: HeadShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    @abstractmethod
    def refusal(self, layout: AttentionLayout) -> str | None: ...

    @abstractmethod
    def schedule(self, layout: AttentionLayout) -> Schedule: ...

    def work(self, layout: AttentionLayout) -> Work:
        return self.schedule(layout).work

    def plan(self, layout: AttentionLayout) -> SchedulePlan:
        return schedule_plan(self.schedule(layout), self._device)

    def run(self, plan: SchedulePlan, q: Tensor, kv: LayerKV) -> AttentionState:
        return run_schedule(plan, q, kv, self._shape)


def schedule_plan(schedule: Schedule, device: torch.device) -> SchedulePlan:
    order, place = schedule.row_order, schedule.row_place
    return SchedulePlan(
        work=schedule.work,
        num_rows=schedule.num_rows,
        stages=[_stage_plan(stage, device) for stage in schedule.stages if stage],
        row_order=None if order is None else index_tensor(order, device),
        row_place=None if place is None else index_tensor(place, device),
    )


def _stage_plan(calls: Sequence[Call], device: torch.device) -> StagePlan:
    start = min(int(call.row_start.min()) for call in calls)
    stop = max(int((call.row_start + call.rows).max()) for call in calls)
    rows = sum(int(call.rows.sum()) for call in calls)
    return StagePlan(
        calls=[device_call(call, start, stop, device) for call in calls],
        row_start=start,
        row_stop=stop,
        is_full=rows == stop - start,
    )


def run_schedule(plan: SchedulePlan, q: Tensor, kv: LayerKV, shape: HeadShape) -> AttentionState:
    ordered = q if plan.row_order is None else q.index_select(0, plan.row_order)
    flat = FlatKV.of_layer(kv)
    state: AttentionState | None = None
    for stage in plan.stages:
        part = _run_stage(stage, ordered, flat, shape)
        if state is None and stage.is_full and stage.rows == plan.num_rows:
            state = part
            continue
        if state is None:
            state = empty_state(plan.num_rows, q)
        merge_into(state, part, stage.row_start)
    if state is None:
        state = empty_state(plan.num_rows, q)
    if plan.row_place is not None:
        out, lse = state
        state = AttentionState(
            out.index_select(0, plan.row_place), lse.index_select(0, plan.row_place)
        )
    return AttentionState(state.out.to(q.dtype), state.lse)


def empty_state(rows: int, q: Tensor) -> AttentionState:
    """The state of rows that have seen nothing, in at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return AttentionState(
        q.new_zeros(rows, *q.shape[1:], dtype=dtype),
        q.new_full((rows, q.shape[1]), -torch.inf, dtype=torch.float32),
    )


def merge_into(state: AttentionState, part: AttentionState, row_start: int) -> None:
    """Merge a part over further keys into a range of rows; two parts of a row at a time."""
    rows = slice(row_start, row_start + len(part.lse))
    out, lse = state.out[rows], state.lse[rows]
    weight = torch.sigmoid(part.lse - lse).nan_to_num_(0.0)  # NaN: neither has seen a key
    out.lerp_(part.out, weight.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, part.lse, out=lse)


def _run_stage(stage: StagePlan, q: Tensor, kv: FlatKV, shape: HeadShape) -> AttentionState:
    if stage.is_one_range:
        out, lse = stage.calls[0].attend(q, kv, shape)
        return AttentionState(out.to(torch.promote_types(out.dtype, torch.float32)), lse)
    part = empty_state(stage.rows + 1, q)  # padding is written to the row after the last
    for call in stage.calls:
        store(part, call, call.attend(q, kv, shape))
    return AttentionState(part.out[:-1], part.lse[:-1])


def store(part: AttentionState, call: DeviceCall, result: AttentionState) -> None:
    if call.target is None:
        part.out[call.target_rows] = result.out
        part.lse[call.target_rows] = result.lse
    else:
        part.out.index_copy_(0, call.target, result.out.to(part.out.dtype))
        part.lse.index_copy_(0, call.target, result.lse)
