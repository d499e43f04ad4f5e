"""Refuse a chat that is malformed or over a limit."""

import json
from collections.abc import Mapping
from typing import Any

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.validation import check_count
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits

MAX_ROLE_CHARACTERS = 64
GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})  # that have fields of their own
KINDS: Mapping[type, str] = {dict: "object", list: "array"}


def check_chat(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    prompt = request.prompt
    if prompt.prefix_id or prompt.WhichOneof("continuation"):
        raise InvalidRequest("prompt", "cannot be given together with chat")
    _check_messages(request.chat, limits)


def check_score_chat(request: inference_pb2.ScoreRequest, limits: Limits) -> None:
    """Of a request with a chat, or an item_marker."""
    if not request.HasField("chat"):
        raise InvalidRequest("item_marker", "needs a chat in which it stands")
    for field in ("query", "contexts", "item_first"):
        if getattr(request, field):
            raise InvalidRequest(field, "cannot be given together with chat")
    _check_messages(request.chat, limits)
    marker = request.item_marker
    if not marker:
        return
    if request.chat.continue_final_message:
        raise InvalidRequest("item_marker", "cannot be given together with continue_final_message")
    found = sum(message.content.count(marker) for message in request.chat.messages)
    if found != 1:
        raise InvalidRequest(
            "item_marker", f"{marker!r} stands {found} times in the contents of chat.messages"
        )


def _check_messages(chat: inference_pb2.Chat, limits: Limits) -> None:
    if not chat.messages:
        raise InvalidRequest("chat.messages", "there are none")
    limit = limits.max_chat_messages
    check_count("chat.messages", len(chat.messages), "max_chat_messages", limit)
    for index, message in enumerate(chat.messages):
        if not 0 < len(message.role) <= MAX_ROLE_CHARACTERS:
            raise InvalidRequest(
                f"chat.messages[{index}].role",
                f"has {len(message.role)} characters; 1 to {MAX_ROLE_CHARACTERS} are allowed",
            )
    if not chat.continue_final_message:
        return
    if chat.add_generation_prompt:
        raise InvalidRequest(
            "chat.continue_final_message", "cannot be given together with add_generation_prompt"
        )
    if not chat.messages[-1].content.strip():
        raise InvalidRequest("chat.continue_final_message", "the last message has no content")


def check_kwargs(kwargs: dict[str, Any]) -> None:
    field = "chat.chat_template_kwargs"
    if taken := GIVEN & kwargs.keys():
        raise InvalidRequest(field, f"{min(taken)!r} has a field of its own")


def read_json(field: str, text: str, kind: type) -> Any:
    """None for an empty text. Raises InvalidRequest for what is no valid JSON of this kind."""
    if not text:
        return None
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # escapes may hide half characters
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not valid JSON: {_reason(error)}") from error
    if not isinstance(value, kind):
        raise InvalidRequest(field, f"must be a JSON {KINDS[kind]}")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeEncodeError():
            return "it holds half a character"
        case _:
            return str(error)
