"""What a call's span says of its request and its answer: counts and settings, never content."""

from stemserve.proto.v1 import inference_pb2
from stemserve.service.tracing.call_trace import CallTrace, Value

PROVIDER = "stemserve"
# OpenTelemetry names no operation for it.
SCORE_OPERATION = "score"
MOST_ID_CHARACTERS = 128


def note_score(trace: CallTrace, request: inference_pb2.ScoreRequest) -> None:
    packed = max(0, len(request.item_tokens.offsets) - 1)
    trace.attributes |= {
        "gen_ai.operation.name": SCORE_OPERATION,
        "gen_ai.provider.name": PROVIDER,
        "stemserve.score.mode": request.WhichOneof("mode") or "",
        "stemserve.score.items": len(request.items) or packed,
        "stemserve.score.contexts": len(request.contexts),
        "stemserve.priority": request.priority,
        **_ids(request.request_id),
    }


def note_generate(trace: CallTrace, request: inference_pb2.GenerateRequest) -> None:
    sampling = request.sampling
    trace.attributes |= {
        "gen_ai.operation.name": "chat" if request.HasField("chat") else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.choice.count": request.n if request.HasField("n") else 1,
        "gen_ai.request.stream": True,
        "stemserve.priority": request.priority,
        **_ids(request.request_id),
    }
    if request.HasField("max_new_tokens"):
        trace.attributes["gen_ai.request.max_tokens"] = request.max_new_tokens
    given: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
    }
    fields = {name.rpartition(".")[2]: name for name in given}
    set_fields = {field.name for field, _ in sampling.ListFields()}
    trace.attributes |= {fields[n]: given[fields[n]] for n in fields.keys() & set_fields}
    if request.HasField("beam_search"):
        trace.attributes["stemserve.beam_search.width"] = request.beam_search.width
    if constraint := request.WhichOneof("constraint"):
        trace.attributes["stemserve.constraint"] = constraint


def note_score_answer(trace: CallTrace, answer: inference_pb2.ScoreResponse) -> None:
    """The last of a call that is answered in parts; the others have no usage."""
    if answer.HasField("usage"):
        _note_usage(trace, answer.usage)
    errors = trace.attributes.get("stemserve.score.item_errors", 0)
    if isinstance(errors, int):
        trace.attributes["stemserve.score.item_errors"] = errors + len(answer.errors)


def note_generate_answer(
    trace: CallTrace, answer: inference_pb2.GenerateResponse, now: float
) -> None:
    if answer.token_ids and trace.first_token_s is None:
        trace.first_token_s = now
    reasons = tuple(
        inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        for reason in answer.finish_reason
        if reason
    )
    if reasons:
        known = trace.attributes.get("gen_ai.response.finish_reasons", ())
        before = known if isinstance(known, tuple) else ()
        trace.attributes["gen_ai.response.finish_reasons"] = (*before, *reasons)
    if answer.HasField("usage"):
        _note_usage(trace, answer.usage)


def _note_usage(trace: CallTrace, usage: inference_pb2.Usage) -> None:
    trace.attributes |= {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "stemserve.usage.shared_tokens": usage.shared_tokens,
        "stemserve.usage.computed_tokens": usage.computed_tokens,
        "stemserve.usage.kv_read_bytes": usage.kv_read_bytes,
        "stemserve.usage.kv_avoided_bytes": usage.kv_avoided_bytes,
    }


def _ids(request_id: str) -> dict[str, Value]:
    return {"stemserve.request.id": request_id[:MOST_ID_CHARACTERS]} if request_id else {}
