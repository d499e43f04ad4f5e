"""The options of generate and score that make a chat."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client.chat_request import chat_request
from stemserve.service.commands.options import read_text

Chat = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="A message to the model's chat template; @FILE: a JSON list of messages, @- reads "
        "standard input.",
    ),
]
Tools = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="JSON list of tools for the template; with --chat."),
]
ChatKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help='More for the template: {"enable_thinking": false}; with --chat.'
    ),
]
ContinueFinal = Annotated[
    bool, typer.Option("--continue-final", help="Go on with the last message; with --chat.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """As they were typed."""

    chat: str | None
    tools: str | None
    kwargs: str | None
    continue_final: bool = False

    def request(self) -> inference_pb2.Chat | None:
        """None without --chat."""
        if self.chat is None:
            if self.tools is not None or self.kwargs is not None or self.continue_final:
                raise typer.BadParameter(
                    "--tools, --chat-kwargs and --continue-final go with --chat"
                )
            return None
        messages: Any = [{"role": "user", "content": self.chat}]
        if self.chat.startswith("@"):
            messages = _objects("--chat", _file("--chat", self.chat[1:]))
        tools = _objects("--tools", _file("--tools", self.tools)) if self.tools else ()
        kwargs: Any = {} if self.kwargs is None else _value("--chat-kwargs", self.kwargs)
        if not isinstance(kwargs, dict):
            raise typer.BadParameter("--chat-kwargs is not a JSON object")
        try:
            return chat_request(
                messages,
                tools=tools,
                chat_template_kwargs=cast(dict[str, Any], kwargs),
                continue_final_message=self.continue_final,
            )
        except ValueError as error:
            raise typer.BadParameter(f"--chat: {error}") from error


def _file(option: str, name: str) -> Any:
    return _value(option, read_text(option, name))


def _value(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{option} is not valid JSON: {error}") from error


def _objects(option: str, value: Any) -> list[dict[str, Any]]:
    match value:
        case [*entries] if all(isinstance(entry, dict) for entry in entries):
            return entries
        case _:
            raise typer.BadParameter(f"{option} is not a JSON list of objects")
