"""Score calls of token ids for tests, answered by a toy engine without a server."""

from collections.abc import Sequence

import numpy as np
from tests.service.bigram_engine import BigramEngine

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import ANYONE
from stemserve.service.calls.scores.score_answer import score_response
from stemserve.service.calls.scores.score_call import ScoreCall
from stemserve.service.calls.scores.score_encoder import find_problems
from stemserve.service.calls.scores.scoring import nothing_read, plan_score, score_job
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import pack
from stemserve.service.request import Int32


def ids(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


CONTEXT = ids(0, 1)
NO_TOKENS = ids()


def make_call(
    request: inference_pb2.ScoreRequest,
    items: Sequence[Int32],
    *,
    contexts: Sequence[Int32] = (CONTEXT,),
    labels: Sequence[tuple[int, ...]] = (),
    query: Int32 = NO_TOKENS,
    classes: int = 0,
) -> ScoreCall:
    call = ScoreCall(
        request=request,
        caller=ANYONE,
        limits=Limits(),
        contexts=tuple(contexts),
        items=pack(list(items)),
        item_context=np.array(request.item_context or [0] * len(items), dtype=np.int32),
        query=query,
        labels=tuple(labels),
        problems={},
        classes=classes,
    )
    return find_problems(call, 64)


async def answer(engine: BigramEngine, call: ScoreCall) -> inference_pb2.ScoreResponse:
    plan = plan_score(call)
    if not len(plan.rows.items):
        return score_response(plan, nothing_read(call))
    job = score_job(plan, request_id="1", deadline=None)
    return score_response(plan, await engine.score(job))


def likelihood(**options: bool) -> inference_pb2.ScoreRequest:
    return inference_pb2.ScoreRequest(log_likelihood=inference_pb2.LogLikelihood(**options))


def label_request(**options: float) -> inference_pb2.ScoreRequest:
    probabilities = inference_pb2.LabelProbabilities()
    probabilities.apply_softmax = bool(options.get("apply_softmax", False))
    probabilities.temperature = options.get("temperature", 0.0)
    return inference_pb2.ScoreRequest(label_probabilities=probabilities)
