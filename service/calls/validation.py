"""Refuse a Score request that is malformed or over a limit, before anything is made of it."""

import math

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.wire_tokens import TOKEN_BYTES
from stemserve.service.errors import InvalidRequest, WrongModelKind
from stemserve.service.limits import Limits
from stemserve.service.request import WorkerFacts

MAX_ID_CHARACTERS = 256
FLOAT_BYTES = 4
ERROR_BYTES = 160  # of an item's error
KERNELS = frozenset(inference_pb2.Kernel.values())


def check_score(
    request: inference_pb2.ScoreRequest,
    limits: Limits,
    facts: WorkerFacts,
    *,
    most_items: int | None = None,
) -> None:
    """`most_items` of one answer, where it comes in parts."""
    check_id("request_id", request.request_id)
    check_kernel(request.kernel)
    _check_mode(request, facts)
    _check_contexts(request, limits)
    _check_items(request, limits)
    _check_labels(request.label_probabilities, limits)
    characters = len(request.query) + chat_characters(request.chat)
    token_bytes = len(request.item_tokens.tokens)
    for context in request.contexts:
        characters += len(context.text)
        token_bytes += len(context.tokens)
    for texts in (request.items, request.label_probabilities.labels):
        characters += sum(map(len, texts))
    check_characters(characters, limits)
    check_tokens("item_tokens", token_bytes // TOKEN_BYTES, limits)
    check_answer(request, limits, facts, most_items=most_items)


def item_count(request: inference_pb2.ScoreRequest) -> int:
    return len(request.items) or max(len(request.item_tokens.offsets) - 1, 0)


def label_count(labels: inference_pb2.LabelProbabilities) -> int:
    packed = max(len(labels.label_tokens.offsets) - 1, 0)
    return len(labels.labels) + len(labels.label_token_ids) + packed


def check_id(field: str, value: str) -> None:
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidRequest(
            field, f"has {len(value)} characters; at most {MAX_ID_CHARACTERS} are allowed"
        )


def check_ttl(ttl_s: float) -> None:
    if not math.isfinite(ttl_s) or ttl_s < 0:
        raise InvalidRequest("ttl_seconds", f"{ttl_s} is not a number of seconds")


def check_kernel(kernel: int) -> None:
    if kernel not in KERNELS:
        known = ", ".join(inference_pb2.Kernel.keys())
        raise InvalidRequest("kernel", f"{kernel} is not one of {known}")


def check_priority(priority: int, caller: Caller) -> None:
    if caller.max_priority is not None and priority > caller.max_priority:
        raise InvalidRequest(
            "priority",
            f"{priority} is more than {caller.max_priority}, the tenant's max_priority",
        )


def check_count(field: str, count: int, name: str, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(field, f"{count} is more than {name} ({limit})")


def check_tokens(field: str, tokens: int, limits: Limits) -> None:
    check_count(field, tokens, "max_request_tokens", limits.max_request_tokens)


def check_characters(characters: int, limits: Limits) -> None:
    if characters > limits.max_text_characters:
        raise InvalidRequest(
            "text",
            f"the call has {characters} characters of text, more than max_text_characters "
            f"({limits.max_text_characters})",
        )


def chat_characters(chat: inference_pb2.Chat) -> int:
    messages = sum(len(m.role) + len(m.content) + len(m.fields) for m in chat.messages)
    return messages + len(chat.tools) + len(chat.chat_template_kwargs)


def check_lm_head(facts: WorkerFacts) -> None:
    if not facts.has_lm_head:
        raise WrongModelKind(
            f"{facts.model} has a classification head only; call Score with classification"
        )


def _check_mode(request: inference_pb2.ScoreRequest, facts: WorkerFacts) -> None:
    match request.WhichOneof("mode"):
        case None:
            raise InvalidRequest(
                "mode", "set one of label_probabilities, log_likelihood and classification"
            )
        case "classification":
            if not facts.class_labels:
                raise WrongModelKind(
                    f"{facts.model} has no classification head; use label_probabilities or "
                    "log_likelihood"
                )
        case _:
            check_lm_head(facts)


def _check_contexts(request: inference_pb2.ScoreRequest, limits: Limits) -> None:
    check_count("contexts", len(request.contexts), "max_contexts", limits.max_contexts)
    if request.item_first and not request.query:
        raise InvalidRequest("query", "item_first scores the query after each item; it is empty")
    if request.query and request.contexts and not request.item_first:
        raise InvalidRequest("query", "cannot be given together with contexts unless item_first")
    for index, context in enumerate(request.contexts):
        check_id(f"contexts[{index}].prefix_id", context.prefix_id)


def _check_items(request: inference_pb2.ScoreRequest, limits: Limits) -> None:
    if request.items and request.HasField("item_tokens"):
        raise InvalidRequest("items", "give either items or item_tokens")
    count = item_count(request)
    if not count:
        raise InvalidRequest("items", "there are none; give items or item_tokens")
    check_count("items", count, "max_items", limits.max_items)
    if request.HasField("truncate_item_tokens") and not request.truncate_item_tokens:
        raise InvalidRequest("truncate_item_tokens", "must be at least 1")
    if not request.item_context:
        return
    if len(request.item_context) != count:
        raise InvalidRequest(
            "item_context", f"has {len(request.item_context)} entries for {count} items"
        )
    contexts = max(len(request.contexts), 1)
    if (largest := max(request.item_context)) >= contexts:
        raise InvalidRequest("item_context", f"names context {largest} of {contexts}")


def _check_labels(labels: inference_pb2.LabelProbabilities, limits: Limits) -> None:
    field = "label_probabilities"
    given = [
        bool(labels.labels),
        bool(labels.label_token_ids),
        labels.HasField("label_tokens"),
    ]
    if sum(given) > 1:
        raise InvalidRequest(field, "give one of labels, label_token_ids and label_tokens")
    count = label_count(labels)
    check_count(f"{field}.labels", count, "max_labels", limits.max_labels)
    longest = limits.max_label_tokens * limits.max_labels
    tokens = len(labels.label_tokens.tokens) // TOKEN_BYTES
    check_count(f"{field}.label_tokens", tokens, "max_labels x max_label_tokens", longest)
    if not math.isfinite(labels.temperature) or labels.temperature < 0:
        raise InvalidRequest(f"{field}.temperature", f"{labels.temperature} is not a temperature")
    if labels.temperature and not labels.apply_softmax:
        raise InvalidRequest(f"{field}.temperature", "has no effect without apply_softmax")


def check_answer(
    request: inference_pb2.ScoreRequest,
    limits: Limits,
    facts: WorkerFacts,
    *,
    most_items: int | None = None,
    item_tokens: int = 0,
) -> None:
    """`most_items` of one answer, where it comes in parts; `item_tokens` of as many, the longest,
    once they are known."""
    mode, columns = request.WhichOneof("mode"), 1
    if mode == "label_probabilities":
        columns = label_count(request.label_probabilities)
        if not columns:
            raise InvalidRequest("label_probabilities.labels", "there are none")
    elif mode == "classification":
        columns = len(facts.class_labels)
    items = item_count(request)
    rows = min(request.top_n or items, most_items or items, items)
    # What has an error has no scores. Those that top_n leaves out may have errors too.
    answer_bytes = rows * (columns + 2) * FLOAT_BYTES
    answer_bytes = max(answer_bytes, min(most_items or items, items) * ERROR_BYTES)
    if request.log_likelihood.token_logprobs:
        answer_bytes += item_tokens * FLOAT_BYTES
    if answer_bytes > limits.max_message_bytes:
        raise InvalidRequest(
            "items",
            f"the answer would take {answer_bytes} bytes, more than max_message_bytes "
            f"({limits.max_message_bytes}); send fewer items or labels, or set top_n",
        )
