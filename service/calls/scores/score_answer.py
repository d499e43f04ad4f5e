"""Make the answer of a Score call of what the engine read."""

from collections.abc import Mapping

import grpc
import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.scores.reading import Readout
from stemserve.service.calls.scores.score_call import Problem
from stemserve.service.calls.scores.scoring import ScorePlan
from stemserve.service.errors import EngineFault
from stemserve.service.packed_tokens import offsets, slice_indices
from stemserve.service.request import Float32, Int32, JobUsage, ScoreResult

NOT_FINITE = Problem(
    code=grpc.StatusCode.INTERNAL, message="the model's outputs for this item are not finite"
)

TOO_LATE = Problem(
    code=grpc.StatusCode.DEADLINE_EXCEEDED,
    message="the deadline came before the item was scored",
)


def score_response(plan: ScorePlan, result: ScoreResult) -> inference_pb2.ScoreResponse:
    """Everything but the timing."""
    _check_sizes(plan, result)
    request = plan.call.request
    readout = plan.mode.read(result)
    finite = _finite_rows(plan, result, readout)
    is_whole = not plan.call.problems and finite.all()
    if request.top_n:
        order = _best(readout, finite, request.top_n)
        response = rows_message(request, readout, order)
        response.item_index.extend(plan.rows.items[order].tolist())
    else:
        response = rows_message(request, readout, None if is_whole else _all(plan, finite))
    if not is_whole:
        response.errors.extend(_item_errors(plan, result, finite))
    response.partial = bool(len(result.unread_units))
    response.usage.CopyFrom(usage_message(result.usage))
    return response


def rows_message(
    request: inference_pb2.ScoreRequest, readout: Readout, order: Int32 | None
) -> inference_pb2.ScoreResponse:
    """The numbers of the readout's rows in this order, None: as they are; -1: a row without a
    score."""
    if order is not None:
        readout = _ordered(readout, order)
    response = inference_pb2.ScoreResponse(
        request_id=request.request_id,
        shape=readout.scores.shape,
        scores=readout.scores.ravel().tolist(),
        over_labels=request.label_probabilities.apply_softmax
        or request.classification.apply_softmax,
    )
    if readout.label_mass is not None:
        response.label_mass.extend(readout.label_mass.tolist())
    if readout.is_greedy is not None:
        response.is_greedy.extend(readout.is_greedy.tolist())
    if readout.token_logprobs is not None and readout.token_indptr is not None:
        response.token_logprobs.extend(readout.token_logprobs.tolist())
        response.token_logprob_offsets.extend(readout.token_indptr.tolist())
    return response


def usage_message(usage: JobUsage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        shared_tokens=usage.shared_tokens,
        computed_tokens=usage.computed_tokens,
        output_tokens=usage.output_tokens,
        kv_read_bytes=usage.kv_read_bytes,
        kv_avoided_bytes=usage.kv_avoided_bytes,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
    )


def _check_sizes(plan: ScorePlan, result: ScoreResult) -> None:
    reads = plan.reads
    if len(result.gather_logprobs) != len(reads.gather_ids):
        found, wanted = len(result.gather_logprobs), len(reads.gather_ids)
        raise EngineFault(f"the engine read {found} log-probabilities instead of {wanted}")
    if len(result.gather_argmax) != len(reads.gather_unit):
        found, wanted = len(result.gather_argmax), len(reads.gather_unit)
        raise EngineFault(f"the engine read {found} rows instead of {wanted}")
    if reads.classify and len(result.class_scores) != len(reads.units):
        found, wanted = len(result.class_scores), len(reads.units)
        raise EngineFault(f"the engine classified {found} items instead of {wanted}")


def _finite_rows(plan: ScorePlan, result: ScoreResult, readout: Readout) -> NDArray[np.bool_]:
    finite = has_scores(readout)
    for units in (result.failed_units, result.unread_units):
        if len(units):
            finite[plan.reads.unit_row[units]] = False
    return finite


def has_scores(readout: Readout) -> NDArray[np.bool_]:  # [rows]
    return np.asarray(np.isfinite(_columns(readout.scores)).all(axis=1))


def _best(readout: Readout, finite: NDArray[np.bool_], top_n: int) -> Int32:
    """The best rows by their first column, best first; the earlier item first among equals."""
    rows = np.flatnonzero(finite)
    keys = -_columns(readout.scores)[rows, 0]
    return rows[np.argsort(keys, kind="stable")][:top_n].astype(np.int32)


def _columns(scores: Float32) -> Float32:  # [rows, columns]
    return scores if scores.ndim == 2 else scores[:, None]


def _all(plan: ScorePlan, finite: NDArray[np.bool_]) -> Int32:
    """The row of each item, -1 for an item without a score."""
    order = np.full(len(plan.call.items), -1, dtype=np.int32)
    order[plan.rows.items[finite]] = np.flatnonzero(finite)
    return order


def _ordered(readout: Readout, order: Int32) -> Readout:
    has_row = order >= 0
    rows = order[has_row]
    greedy, mass = readout.is_greedy, readout.label_mass
    logprobs, indptr = readout.token_logprobs, readout.token_indptr
    if logprobs is not None and indptr is not None:
        counts = np.zeros(len(order), dtype=np.int32)
        counts[has_row] = indptr[rows + 1] - indptr[rows]
        logprobs = logprobs[slice_indices(indptr[rows], counts[has_row])]
        indptr = offsets(counts)
    if greedy is not None:
        known, greedy = greedy[rows], np.zeros(len(order), dtype=np.bool_)
        greedy[has_row] = known
    return Readout(
        scores=_spread(readout.scores, rows, has_row),
        label_mass=None if mass is None else _spread(mass, rows, has_row),
        is_greedy=greedy,
        token_logprobs=logprobs,
        token_indptr=indptr,
    )


def _spread(values: Float32, rows: Int32, has_row: NDArray[np.bool_]) -> Float32:
    spread = np.full((len(has_row), *values.shape[1:]), np.nan, dtype=np.float32)
    spread[has_row] = values[rows]
    return spread


def _item_errors(
    plan: ScorePlan, result: ScoreResult, finite: NDArray[np.bool_]
) -> list[inference_pb2.ItemError]:
    problems = dict(plan.call.problems)
    problems |= dict.fromkeys(plan.rows.items[~finite].tolist(), NOT_FINITE)
    late = plan.rows.items[plan.reads.unit_row[result.unread_units]]
    problems |= dict.fromkeys(late.tolist(), TOO_LATE)
    return error_messages(problems)


def error_messages(problems: Mapping[int, Problem]) -> list[inference_pb2.ItemError]:
    return [
        inference_pb2.ItemError(index=item, code=problem.code.value[0], message=problem.message)
        for item, problem in sorted(problems.items())
    ]
