"""Turn the messages of a server into the client library's values."""

import numpy as np

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client.results import (
    GenerateStep,
    ItemError,
    Prefix,
    SampleNews,
    Scores,
    Timing,
    Usage,
)

FINISH = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: "",
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_NONE_LEFT: "none_left",
}


def scores(message: inference_pb2.ScoreResponse, *, more: bool = False) -> Scores:
    offsets = list(message.token_logprob_offsets)
    logprobs = np.array(message.token_logprobs, dtype=np.float32)
    rows = message.shape[0] if message.shape else 0
    return Scores(
        scores=np.array(message.scores, dtype=np.float32).reshape(tuple(message.shape)),
        item_index=np.array(message.item_index, dtype=np.int64)
        if message.item_index
        else np.arange(rows),
        label_mass=np.array(message.label_mass, dtype=np.float32),
        is_greedy=np.array(message.is_greedy, dtype=np.bool_),
        token_logprobs=tuple(
            logprobs[start:end] for start, end in zip(offsets, offsets[1:], strict=False)
        ),
        errors=tuple(
            ItemError(index=error.index, code=error.code, message=error.message)
            for error in message.errors
        ),
        usage=usage(message.usage),
        timing=timing(message.timing),
        over_labels=message.over_labels,
        partial=message.partial,
        more=more,
    )


def generate_step(message: inference_pb2.GenerateResponse) -> GenerateStep:
    return GenerateStep(
        news=tuple(_sample_news(message, row) for row in range(len(message.sample_index))),
        usage=usage(message.usage) if message.HasField("usage") else None,
        timing=timing(message.timing) if message.HasField("timing") else None,
        prompt_logprobs=np.array(message.prompt_logprobs, dtype=np.float32)
        if message.prompt_logprobs
        else None,
    )


def _sample_news(message: inference_pb2.GenerateResponse, row: int) -> SampleNews:
    tokens = slice(message.token_offsets[row], message.token_offsets[row + 1])
    return SampleNews(
        sample=message.sample_index[row],
        text=message.text[row],
        token_ids=tuple(message.token_ids[tokens]),
        finish=FINISH[message.finish_reason[row]],
        logprobs=tuple(message.logprobs[tokens]),
        top_logprobs=tuple(
            tuple((token.token_id, token.logprob) for token in top.tokens)
            for top in message.top_logprobs[tokens]
        ),
        asked_logprobs=_asked(message, tokens),
        score=message.beam_scores[row] if message.beam_scores else None,
    )


def _asked(message: inference_pb2.GenerateResponse, tokens: slice) -> tuple[tuple[float, ...], ...]:
    if not message.asked_logprobs:
        return ()
    by_token = np.array(message.asked_logprobs).reshape(len(message.token_ids), -1)
    return tuple(map(tuple, by_token[tokens].tolist()))


def usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        shared_tokens=message.shared_tokens,
        computed_tokens=message.computed_tokens,
        output_tokens=message.output_tokens,
        kv_read_bytes=message.kv_read_bytes,
        kv_avoided_bytes=message.kv_avoided_bytes,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
    )


def timing(message: inference_pb2.Timing) -> Timing:
    return Timing(
        total_seconds=message.total_seconds,
        tokenize_seconds=message.tokenize_seconds,
        queue_seconds=message.queue_seconds,
        engine_seconds=message.engine_seconds,
    )


def prefix(message: prefixes_pb2.Prefix) -> Prefix:
    return Prefix(
        prefix_id=message.prefix_id,
        parent_prefix_id=message.parent_prefix_id,
        token_count=message.token_count,
        resident_tokens=message.resident_tokens,
        pinned=message.pinned,
        shared=message.shared,
        ttl_seconds=message.ttl_seconds,
        expires_unix_seconds=message.expires_unix_seconds,
    )
