"""Turn a tokenised Score call into a job for the engine."""

from dataclasses import dataclass

import numpy as np

from stemserve.service.caller import Caller
from stemserve.service.calls.scores.class_scoring import ClassScoring
from stemserve.service.calls.scores.label_scoring import LabelScoring
from stemserve.service.calls.scores.likelihood_scoring import LikelihoodScoring
from stemserve.service.calls.scores.reading import NO_IDS, Mode, Reads
from stemserve.service.calls.scores.score_call import ScoreCall, ScoredRows, scored_rows
from stemserve.service.request import Int32, JobTiming, JobUsage, ScoreJob, ScoreResult, Trunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScorePlan:
    call: ScoreCall
    rows: ScoredRows
    reads: Reads
    mode: Mode


def plan_score(call: ScoreCall) -> ScorePlan:
    rows = scored_rows(call)
    reads, mode = _plan_mode(call, rows)
    return ScorePlan(call=call, rows=rows, reads=reads, mode=mode)


def _plan_mode(call: ScoreCall, rows: ScoredRows) -> tuple[Reads, Mode]:
    match call.request.WhichOneof("mode"):
        case "label_probabilities":
            return LabelScoring.plan(call, rows)
        case "log_likelihood":
            return LikelihoodScoring.plan(call, rows)
        case _:
            return ClassScoring.plan(call, rows)


def score_job(
    plan: ScorePlan, *, request_id: str, deadline: float | None, parts: bool = False
) -> ScoreJob:
    reads = plan.reads
    return ScoreJob(
        request_id=request_id,
        contexts=plan.call.contexts,
        unit_tokens=reads.units.tokens,
        unit_indptr=reads.units.indptr,
        unit_context=plan.rows.context[reads.unit_row],
        gather_unit=reads.gather_unit,
        gather_offset=reads.gather_offset,
        gather_indptr=reads.gather_indptr,
        gather_ids=reads.gather_ids,
        classify=reads.classify,
        priority=plan.call.request.priority,
        deadline=deadline,
        salt=plan.call.caller.salt,
        trunks=plan.call.trunks,
        tenant=plan.call.caller.tenant,
        kernel=plan.call.request.kernel,
        partial=plan.call.request.partial_results,
        parts=parts,
    )


def context_job(
    tokens: Int32, trunk: Trunk, caller: Caller, *, request_id: str, deadline: float | None
) -> ScoreJob:
    """Computes one context and reads nothing."""
    return ScoreJob(
        request_id=request_id,
        contexts=(tokens,),
        unit_tokens=NO_IDS,
        unit_indptr=np.zeros(1, dtype=np.int32),
        unit_context=NO_IDS,
        gather_unit=NO_IDS,
        gather_offset=NO_IDS,
        gather_indptr=np.zeros(1, dtype=np.int32),
        gather_ids=NO_IDS,
        deadline=deadline,
        salt=caller.salt,
        trunks=(trunk,),
        tenant=caller.tenant,
    )


def nothing_read(call: ScoreCall) -> ScoreResult:
    """The result for a call of which no item can be scored."""
    return ScoreResult(
        request_id="",
        gather_logprobs=np.zeros(0, dtype=np.float32),
        gather_argmax=NO_IDS,
        class_scores=np.zeros((0, call.classes), dtype=np.float32),
        failed_units=NO_IDS,
        unread_units=NO_IDS,
        usage=JobUsage(),
        timing=JobTiming(),
    )
