"""Refuse a Generate request that is malformed or over a limit, before anything is made of it."""

import math

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.chat_validation import check_chat
from stemserve.service.calls.generation.beam_validation import check_beams
from stemserve.service.calls.generation.generate_counts import new_tokens, sample_count
from stemserve.service.calls.validation import (
    chat_characters,
    check_characters,
    check_count,
    check_id,
    check_kernel,
    check_lm_head,
    check_tokens,
)
from stemserve.service.calls.wire_tokens import TOKEN_BYTES
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import MOST_DRAFT_TOKENS, Limits
from stemserve.service.request import WorkerFacts

TOKEN_ANSWER_BYTES = 64  # of a new token in an answer, its text included
TOP_BYTES = 16  # of each of its likeliest tokens
ASKED_BYTES = 4  # of each token whose log-probability is asked for
MOST_ASKED = 128
MOST_REPETITION = 128.0  # as a factor; as a divisor too
MOST_PENALTY = 100.0  # in logits


def check_generate(
    request: inference_pb2.GenerateRequest, limits: Limits, facts: WorkerFacts
) -> None:
    check_id("request_id", request.request_id)
    check_id("prompt.prefix_id", request.prompt.prefix_id)
    check_kernel(request.kernel)
    check_lm_head(facts)
    check_characters(len(request.prompt.text) + chat_characters(request.chat), limits)
    check_tokens("prompt", len(request.prompt.tokens) // TOKEN_BYTES, limits)
    if request.HasField("chat"):
        check_chat(request, limits)
    if request.HasField("beam_search"):
        check_beams(request, limits, facts)
    _check_counts(request, limits, facts)
    if not request.HasField("beam_search"):
        _check_samples(request, limits, facts)
    _check_ids(request, facts)
    _check_stops(request, limits)
    _check_sampling(request.sampling)
    _check_constraint(request, limits)


def _check_samples(
    request: inference_pb2.GenerateRequest, limits: Limits, facts: WorkerFacts
) -> None:
    check_count("n", sample_count(request), "max_n", min(limits.max_n, facts.sampler_slots))
    asked_bytes = len(request.logprob_token_ids) * ASKED_BYTES
    token_bytes = TOKEN_ANSWER_BYTES + request.top_logprobs * TOP_BYTES + asked_bytes
    waiting = sample_count(request) * request.stream_interval
    check_count(
        "stream_interval", waiting, "max_unread_tokens, of all samples", limits.max_unread_tokens
    )
    in_a_step = max(facts.max_burst_steps, 1 + request.draft_tokens)
    most_tokens = in_a_step + max(0, request.stream_interval - 1)  # of a sample
    step_bytes = sample_count(request) * token_bytes * most_tokens
    if request.prompt_logprobs:
        step_bytes += min(limits.max_request_tokens, facts.context_tokens) * ASKED_BYTES
    if step_bytes > limits.max_message_bytes:
        raise InvalidRequest(
            "n",
            f"one message of the answer may take {step_bytes} bytes, more than max_message_bytes "
            f"({limits.max_message_bytes}); ask for fewer samples, log-probabilities or tokens a "
            "message",
        )


def _check_counts(
    request: inference_pb2.GenerateRequest, limits: Limits, facts: WorkerFacts
) -> None:
    if not sample_count(request):
        raise InvalidRequest("n", "must be at least 1")
    if not new_tokens(request):
        raise InvalidRequest(
            "max_new_tokens", "must be at least 1; to compute a prefix only, register it with warm"
        )
    if request.min_new_tokens > new_tokens(request):
        raise InvalidRequest(
            "min_new_tokens",
            f"{request.min_new_tokens} is more than max_new_tokens ({new_tokens(request)})",
        )
    drafted = request.draft_tokens
    check_count("draft_tokens", drafted, "the most that are guessed ahead", MOST_DRAFT_TOKENS)
    limit = min(limits.max_top_logprobs, facts.vocab_size)
    check_count("top_logprobs", request.top_logprobs, "max_top_logprobs", limit)
    asked = len(request.logprob_token_ids)
    check_count("logprob_token_ids", asked, "the most that are read at a position", MOST_ASKED)


def _check_ids(request: inference_pb2.GenerateRequest, facts: WorkerFacts) -> None:
    """Before arrays are made of them: more ids than there are tokens only repeat themselves."""
    counts = {
        "stop_token_ids": len(request.stop_token_ids),
        "sampling.logit_bias": len(request.sampling.logit_bias),
        "sampling.banned_token_ids": len(request.sampling.banned_token_ids),
        "sampling.allowed_token_ids": len(request.sampling.allowed_token_ids),
    }
    for field, count in counts.items():
        check_count(field, count, "the model's vocabulary", facts.vocab_size)


def _check_stops(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    check_count("stop", len(request.stop), "max_stop_strings", limits.max_stop_strings)
    for index, stop in enumerate(request.stop):
        if not stop:
            raise InvalidRequest(f"stop[{index}]", "is empty")
        check_count(f"stop[{index}]", len(stop), "max_stop_characters", limits.max_stop_characters)


def _check_sampling(sampling: inference_pb2.SamplingParams) -> None:
    temperature = sampling.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise InvalidRequest("sampling.temperature", f"{temperature} is not a temperature")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidRequest("sampling.top_p", f"{sampling.top_p} is not above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("sampling.min_p", f"{sampling.min_p} is not between 0 and 1")
    _check_penalties(sampling)
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"sampling.logit_bias[{token_id}]", f"{bias} is not finite")


def _check_penalties(sampling: inference_pb2.SamplingParams) -> None:
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 1 / MOST_REPETITION <= repetition <= MOST_REPETITION:
        raise InvalidRequest(
            "sampling.repetition_penalty",
            f"{repetition} is not between 1/{MOST_REPETITION:g} and {MOST_REPETITION:g}",
        )
    penalties = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    for name, penalty in penalties.items():
        if not -MOST_PENALTY <= penalty <= MOST_PENALTY:
            raise InvalidRequest(
                f"sampling.{name}",
                f"{penalty} is not between {-MOST_PENALTY:g} and {MOST_PENALTY:g}",
            )


def _check_constraint(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    kind = request.WhichOneof("constraint")
    if kind is None:
        return
    if request.ignore_eos:
        raise InvalidRequest("ignore_eos", f"not together with {kind}, whose end is an EOS")
    limit, name = limits.max_constraint_characters, "max_constraint_characters"
    if kind == "token_sequences":
        count = len(request.token_sequences.offsets) - 1
        limit = limits.max_token_sequences
        check_count("token_sequences", count, "max_token_sequences", limit)
        return
    if kind == "trie_id":
        if not request.trie_id:
            raise InvalidRequest(kind, "is empty")
        check_id(kind, request.trie_id)
        return
    if kind != "choice":
        text: str = getattr(request, kind)
        if not text:
            raise InvalidRequest(kind, "is empty")
        check_count(kind, len(text), name, limit)
        return
    texts = request.choice.texts
    if not texts or not all(texts):
        raise InvalidRequest("choice", "needs texts, none of them empty")
    check_count("choice", len(texts), "max_choices", limits.max_choices)
    check_count("choice", sum(map(len, texts)), name, limit)
