"""Messages as chat programs write them, as the Chat of a request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stemserve.proto.v1 import inference_pb2


def chat_request(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> inference_pb2.Chat:
    """Each message has a role, a content and what else the template reads, such as tool_calls.

    A content may be a list of text parts, which become lines of one text. Raises ValueError.
    """
    return inference_pb2.Chat(
        messages=[_message(message) for message in messages],
        tools=_json(list(tools)) if tools else "",
        chat_template_kwargs=_json(dict(chat_template_kwargs)) if chat_template_kwargs else "",
        continue_final_message=continue_final_message,
    )


def _message(message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    more = dict(message)
    role, content = more.pop("role", None), more.pop("content", None)
    if not isinstance(role, str):
        raise ValueError("each message needs a role, a text")
    return inference_pb2.ChatMessage(
        role=role,
        content=None if content is None else _text(content),
        fields=_json(more) if more else "",
    )


def _text(content: Any) -> str:
    match content:
        case str():
            return content
        case [*parts]:
            return "\n".join(map(_part, parts))
        case _:
            raise ValueError("a content must be a text or a list of text parts")


def _part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise ValueError('a part of a content must be {"type": "text", "text": ...}')


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
