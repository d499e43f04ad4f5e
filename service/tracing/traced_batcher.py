"""A batcher that tells the calls that are traced of the steps in which they have rows."""

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.batching.batcher import Batcher
from stemserve.service.request import Event, GenerateChunk, Job, ScorePart
from stemserve.service.tracing.call_trace import CallTrace, GroupRun, StepShare, TracedStep


class TracedBatcher(Batcher):
    """Where no job is traced, a step costs what it costs without."""

    _traces: dict[str, CallTrace]  # by request id
    _traced_steps: dict[int, tuple[TracedStep, list[CallTrace]]]  # by step id

    def _reset(self) -> None:
        super()._reset()
        self._traces = {}
        self._traced_steps = {}

    def submit(self, job: Job) -> None:
        if job.trace is None:
            super().submit(job)
            return
        job.trace.submit(self._clock())
        super().submit(job)
        self._traces[job.request_id] = job.trace

    def cancel(self, request_id: str) -> None:
        self._traces.pop(request_id, None)
        super().cancel(request_id)

    def plan_step(self) -> worker_pb2.StepPlan | None:
        if not self._traces:
            return super().plan_step()
        began_s = self._clock()
        plan = super().plan_step()
        if plan is not None:
            self._note_plan(began_s)
        return plan

    def apply(self, result: worker_pb2.StepResult) -> list[Event]:
        traced = self._traced_steps.pop(result.step_id, None)
        if traced is not None:
            _note_result(*traced, result, now=self._clock())
        return super().apply(result)

    def take_events(self) -> list[Event]:
        events = super().take_events()
        if self._traces:
            for event in events:
                goes_on = isinstance(event, GenerateChunk) and event.usage is None
                if not (goes_on or isinstance(event, ScorePart)):
                    self._traces.pop(event.request_id, None)
        return events

    def _note_plan(self, began_s: float) -> None:
        issued = self._issued[-1]
        step = TracedStep(
            step_id=issued.step_id,
            plan_began_s=began_s,
            plan_ended_s=self._clock(),
            rows=issued.num_rows,
            repeat=issued.repeat,
        )
        told: list[CallTrace] = []
        for arrival, share in issued.shares.items():
            job = self._jobs.by_arrival(arrival)
            trace = None if job is None else self._traces.get(job.request_id)
            if trace is not None:
                trace.take_step(
                    StepShare(
                        step=step, prefill_rows=share.prefill_rows, decode_rows=share.decode_rows
                    )
                )
                told.append(trace)
        if told:
            self._traced_steps[issued.step_id] = (step, told)


def _note_result(
    step: TracedStep, traces: list[CallTrace], result: worker_pb2.StepResult, *, now: float
) -> None:
    step.worker_seconds = result.step_seconds
    step.device_seconds = result.device_seconds
    step.trees = result.trees
    step.failed = bool(result.error)
    step.groups = tuple(_group_run(group) for group in result.groups)
    step.answered_s = now
    for trace in traces:
        trace.take_result(step)


def _group_run(group: worker_pb2.GroupReport) -> GroupRun:
    return GroupRun(
        phase=group.phase,
        kernel=inference_pb2.Kernel.Name(group.kernel).removeprefix("KERNEL_").lower(),
        reason=group.reason,
        rows=group.rows,
        segments=group.segments,
        kv_read_bytes=group.kv_read_bytes,
        kv_avoided_bytes=group.kv_avoided_bytes,
        predicted_seconds=group.predicted_seconds,
        actual_seconds=group.actual_seconds,
    )
