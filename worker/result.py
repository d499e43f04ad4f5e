"""A launched step, and its StepResult once the device has finished it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.attention import PlannedGroup
from stemserve.worker.blobs import encode_float32, encode_int32
from stemserve.worker.choice.dispatch import KERNEL_CODES
from stemserve.worker.device_clock import DeviceSpan
from stemserve.worker.sampling.sampler import Drawn
from stemserve.worker.scorer import Readout, Scores
from stemserve.worker.steps.step import Step

NOBODY = np.empty(0, np.intp)  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """A group that ran, with its predicted seconds and its bytes over all layers."""

    planned: PlannedGroup
    predicted_seconds: float
    kv_read_bytes: int
    kv_avoided_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanStep:
    """One step of the model, launched: of a burst, one sub-step."""

    step: Step
    readout: Readout
    scores: Scores  # on the host, complete once the device has passed the launch
    groups: Sequence[GroupCost]

    def failed_rows(self) -> NDArray[np.integer]:
        """Rows with logits, class scores or draws that are not finite."""
        scores, readout = self.scores, self.readout
        failed = [scores.failed_gathered, scores.failed_classified]
        failed += [drawn.failed for _, drawn in scores.draws]
        if not any(some.numpy().any() for some in failed):
            return NOBODY
        kept = (
            readout.gathered[scores.failed_gathered.numpy()],
            readout.classify_rows[scores.failed_classified.numpy()],
        )
        drawn = [self.step.samples.rows[s[d.failed.numpy()]] for s, d in scores.draws]
        return np.unique(np.concatenate([*(readout.rows[rows] for rows in kept), *drawn]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    step: Step
    ran: Sequence[RanStep]  # [step.repeat] in the order in which they run
    started: float  # time.perf_counter
    span: DeviceSpan | None  # None: the device was the CPU, and all is done
    fallbacks: Mapping[tuple[str, str], int] = field(  # from graphs, by path and reason
        default_factory=dict[tuple[str, str], int]
    )

    @property
    def step_id(self) -> int:
        return self.step.step_id

    def result(self) -> worker_pb2.StepResult:
        """Waits for the device, with what can be done before it is done."""
        groups = [group for ran in self.ran for group in ran.groups]
        reports = [_group_report(group) for group in groups]
        result = worker_pb2.StepResult(
            step_id=self.step.step_id,
            fallbacks=[
                worker_pb2.Fallback(path=path, reason=reason, count=count)
                for (path, reason), count in self.fallbacks.items()
            ],
            trees=self.step.num_trees,
        )
        if self.span is not None:
            self.span.wait()
            result.device_seconds = self.span.seconds
            result.device_idle_seconds = self.span.idle_seconds
        for report, group in zip(reports, groups, strict=True):
            report.actual_seconds = group.planned.clock.seconds()
        result.groups.extend(reports if len(self.ran) == 1 else _added_up(reports))
        self._set_scores(result)
        result.step_seconds = time.perf_counter() - self.started
        return result

    def _set_scores(self, result: worker_pb2.StepResult) -> None:
        first = self.ran[0].scores  # a burst has nothing but draws
        result.gather_logprobs = encode_float32(first.gather_logprobs.numpy())
        result.gather_argmax = encode_int32(first.gather_argmax.numpy())
        result.class_scores = encode_float32(first.class_scores.numpy())
        samples = len(self.step.samples.rows)
        draws = [
            (sub_step * samples + some, drawn)
            for sub_step, ran in enumerate(self.ran)
            for some, drawn in ran.scores.draws
        ]
        if samples:
            _set_samples(result, draws, len(self.ran) * samples)
        result.failed_rows = encode_int32(self._failed_rows())

    def _failed_rows(self) -> NDArray[np.integer]:
        if len(self.ran) == 1:
            return self.ran[0].failed_rows()
        failed: list[NDArray[np.integer]] = []
        for sub_step, ran in enumerate(self.ran):
            rows = ran.failed_rows()
            counting = rows[self.step.row_steps[rows] > sub_step]
            failed.append(counting + sub_step * self.step.num_rows)
        return np.concatenate(failed)


def _set_samples(
    result: worker_pb2.StepResult, draws: Sequence[tuple[NDArray[np.intp], Drawn]], samples: int
) -> None:
    tokens = np.empty(samples, np.int32)
    logprobs = np.empty(samples, np.float32)
    counts = np.zeros(samples, np.int32)
    for some, drawn in draws:
        tokens[some] = drawn.tokens.numpy()
        logprobs[some] = drawn.logprobs.numpy()
        counts[some] = drawn.top_counts
    result.sampled_tokens = encode_int32(tokens)
    result.sampled_logprobs = encode_float32(logprobs)
    if counts.any():
        _set_top_logprobs(result, draws, counts)


def _set_top_logprobs(
    result: worker_pb2.StepResult,
    draws: Sequence[tuple[NDArray[np.intp], Drawn]],
    counts: Int32,  # [samples]
) -> None:
    indptr = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=indptr[1:])
    result.top_indptr = encode_int32(indptr)
    some, drawn = draws[0]
    rows, columns = drawn.top_ids.shape
    asked_all = rows * columns == indptr[-1] and (drawn.top_counts == columns).all()
    if asked_all and (some[1:] > some[:-1]).all():
        # Nobody else reads any, and they lie as they are answered.
        result.top_ids = encode_int32(drawn.top_ids.numpy())
        result.top_logprobs = encode_float32(drawn.top_logprobs.numpy())
        return
    ids = np.empty(indptr[-1], np.int32)
    logprobs = np.empty(indptr[-1], np.float32)
    for some, drawn in draws:
        column = np.arange(drawn.top_ids.shape[1])
        asked = column < drawn.top_counts[:, None]
        place = (indptr[some][:, None] + column)[asked]
        ids[place] = drawn.top_ids.numpy()[asked]
        logprobs[place] = drawn.top_logprobs.numpy()[asked]
    result.top_ids = encode_int32(ids)
    result.top_logprobs = encode_float32(logprobs)


def _added_up(reports: Sequence[worker_pb2.GroupReport]) -> list[worker_pb2.GroupReport]:
    """Of a burst, one report for what ran alike in its sub-steps."""
    alike: dict[tuple[str, int, str, str], worker_pb2.GroupReport] = {}
    for report in reports:
        how = (report.phase, report.kernel, report.reason, report.fallback)
        known = alike.setdefault(how, report)
        if known is not report:
            known.kv_read_bytes += report.kv_read_bytes
            known.kv_avoided_bytes += report.kv_avoided_bytes
            known.predicted_seconds += report.predicted_seconds
            known.actual_seconds += report.actual_seconds
    return list(alike.values())


def _group_report(cost: GroupCost) -> worker_pb2.GroupReport:
    choice = cost.planned.choice
    return worker_pb2.GroupReport(
        phase=choice.group.phase,
        kernel=KERNEL_CODES[choice.strategy.kernel],
        reason=choice.reason,
        rows=choice.group.layout.num_rows,
        segments=choice.group.layout.num_segments,
        kv_read_bytes=cost.kv_read_bytes,
        kv_avoided_bytes=cost.kv_avoided_bytes,
        predicted_seconds=cost.predicted_seconds,
        fallback=choice.fallback,
    )
