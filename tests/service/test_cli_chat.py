"""How the command line reads a chat."""

import json
from pathlib import Path

import pytest
import typer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.commands.chat import ChatOptions


def chat(
    text: str | None,
    *,
    tools: str | None = None,
    kwargs: str | None = None,
    continue_final: bool = False,
) -> inference_pb2.Chat | None:
    return ChatOptions(
        chat=text, tools=tools, kwargs=kwargs, continue_final=continue_final
    ).request()


def test_a_text_is_one_message_of_the_user() -> None:
    read = chat(" hi ", kwargs='{"enable_thinking": false}')
    message = inference_pb2.ChatMessage(role="user", content=" hi ")
    assert read == inference_pb2.Chat(
        messages=[message], chat_template_kwargs='{"enable_thinking": false}'
    )
    assert chat(None) is None


def test_a_file_holds_messages_and_another_one_tools(tmp_path: Path) -> None:
    messages, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    messages.write_text(
        json.dumps([{"role": "user", "content": "é"}, {"role": "assistant", "content": "I"}])
    )
    tools.write_text('[{"name": "è"}]')
    read = chat(f"@{messages}", tools=str(tools), continue_final=True)
    assert read is not None and read.continue_final_message
    assert [(m.role, m.content) for m in read.messages] == [("user", "é"), ("assistant", "I")]
    assert read.tools == '[{"name": "è"}]'


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '[{"content": "a"}]', '"a"'])
def test_a_file_without_messages_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "messages.json"
    file.write_text(content)
    with pytest.raises(typer.BadParameter, match="--chat"):
        chat(f"@{file}")


def test_what_belongs_to_a_chat_is_refused_without_one() -> None:
    with pytest.raises(typer.BadParameter, match="--chat"):
        chat(None, tools="tools.json")
    with pytest.raises(typer.BadParameter, match="--chat"):
        chat(None, continue_final=True)
    for text, kwargs in ((None, "{}"), ("hi", "[]"), ("hi", "x")):
        with pytest.raises(typer.BadParameter, match="--chat"):
            chat(text, kwargs=kwargs)
