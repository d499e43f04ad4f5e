"""Chats through a real socket: what reaches the engine, and what is refused."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.chat_models import chat_folder
from tests.service.generating import generated, prompt
from tests.service.serving import Served, serving

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import ClientError, chat_request
from stemserve.service.limits import Limits
from stemserve.service.request import GenerateJob
from stemserve.service.text.tokenizer_files import load_tokenizer

VOCABULARY = 270
HI = [{"role": "user", "content": "hi"}]
Chat = inference_pb2.Chat
Message = inference_pb2.ChatMessage


@asynccontextmanager
async def chatting(
    folder: Path, source: str | None = None, limits: Limits | None = None
) -> AsyncGenerator[Served]:
    tokenizer = load_tokenizer(chat_folder(folder, "chatml", source))
    engine = BigramEngine(random_bigrams(VOCABULARY), context_tokens=1_000)
    async with serving(engine, tokenizer, limits=limits) as served:
        yield served


def request(chat: Chat, **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(chat=chat, max_new_tokens=5, **fields)


async def test_all_samples_stream_over_the_one_prompt_that_the_template_wrote(
    tmp_path: Path,
) -> None:
    async with chatting(tmp_path) as served:
        steps, samples = await generated(served, request(chat_request(HI), n=3, ignore_eos=True))
        options = inference_pb2.GenerateRequest(max_new_tokens=2)
        assert [step async for step in served.client.chat(HI, options=options)]
        jobs = [job for job in served.engine.jobs if isinstance(job, GenerateJob)]
    tokenizer = load_tokenizer(tmp_path)
    written = (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    for job in jobs:
        assert job.prompt.tolist() == tokenizer.encode_front([written])[0].tolist()
    assert len(jobs[0].samplers) == len(samples) == 3
    assert all(len(news) == 5 for news in samples.values())
    assert steps[-1].usage is not None and steps[-1].usage.output_tokens == 15


REFUSED: dict[str, tuple[inference_pb2.GenerateRequest, str]] = {
    "no messages": (request(Chat()), "chat.messages: there are none"),
    "no role": (request(Chat(messages=[Message()])), "role: has 0 characters"),
    "a long role": (request(Chat(messages=[Message(role="a" * 65)])), "role: has 65 characters"),
    "a prompt too": (request(chat_request(HI), prompt=prompt(1)), "prompt: cannot be given"),
    "tools that are no list": (
        request(Chat(messages=[Message(role="user")], tools="{}")),
        "chat.tools: must be a JSON array",
    ),
    "fields that are no object": (
        request(Chat(messages=[Message(role="user", fields="[]")])),
        r"chat.messages\[0\].fields: must be a JSON object",
    ),
    "a field twice": (
        request(Chat(messages=[Message(role="user", fields='{"content": 1}')])),
        "may not hold 'content'",
    ),
    "a variable twice": (
        request(Chat(messages=[Message(role="user")], chat_template_kwargs='{"tools": 1}')),
        "'tools' has a field of its own",
    ),
    "not JSON": (
        request(Chat(messages=[Message(role="user")], tools="[")),
        "chat.tools: is not valid JSON",
    ),
    "deep JSON": (
        request(Chat(messages=[Message(role="user")], tools="[" * 100_000)),
        "chat.tools: is not valid JSON: it is nested too deeply",
    ),
    "not a number": (
        request(Chat(messages=[Message(role="user")], tools="[NaN]")),
        "NaN is not a JSON number",
    ),
    "half a character": (
        request(Chat(messages=[Message(role="user")], tools='["\\ud800"]')),
        "it holds half a character",
    ),
    "both ends": (
        request(
            Chat(
                messages=[Message(role="user", content="hi")],
                continue_final_message=True,
                add_generation_prompt=True,
            )
        ),
        "cannot be given together with add_generation_prompt",
    ),
    "nothing to continue": (
        request(Chat(messages=[Message(role="user")], continue_final_message=True)),
        "the last message has no content",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_malformed_chat_is_an_invalid_argument(tmp_path: Path, what: str) -> None:
    wrong, problem = REFUSED[what]
    async with chatting(tmp_path) as served:
        with pytest.raises(ClientError, match=problem) as refused:
            await generated(served, wrong)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert not served.engine.jobs


async def test_what_the_template_says_of_a_role_it_does_not_know_is_told(tmp_path: Path) -> None:
    source = "{{ raise_exception('unknown role ' + messages[0].role) }}"
    async with chatting(tmp_path, source) as served:
        with pytest.raises(ClientError, match="refuses it: unknown role critic") as refused:
            await generated(served, request(chat_request([{"role": "critic", "content": ""}])))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_last_message_that_the_template_leaves_out_cannot_be_continued(
    tmp_path: Path,
) -> None:
    async with chatting(tmp_path, "nothing") as served:
        with pytest.raises(ClientError, match="does not show the last message"):
            await generated(served, request(chat_request(HI, continue_final_message=True)))


async def test_a_model_without_a_chat_template_takes_no_chats() -> None:
    async with serving(BigramEngine(random_bigrams(VOCABULARY))) as served:
        with pytest.raises(ClientError, match="this model has no chat template") as refused:
            await generated(served, request(chat_request(HI)))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_slow_template_is_ended_and_holds_up_nobody_else(tmp_path: Path) -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    async with chatting(tmp_path, source, Limits(max_chat_render_ms=100)) as served:
        with pytest.raises(ClientError, match=r"max_chat_render_ms \(100\)") as refused:
            await generated(served, request(chat_request(HI)))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        text = inference_pb2.Context(text="hi")
        await generated(served, inference_pb2.GenerateRequest(prompt=text, max_new_tokens=1))


async def test_the_texts_of_a_chat_count_as_text_of_the_call(tmp_path: Path) -> None:
    chat = Chat(messages=[Message(role="user", content="hi", fields="{}")], tools="[]")
    chat.chat_template_kwargs = '{"a": 1}'
    async with chatting(tmp_path, "", Limits(max_text_characters=17)) as served:
        with pytest.raises(ClientError, match="the call has 18 characters of text"):
            await generated(served, request(chat))


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    ],
)
def test_messages_without_a_role_or_with_other_than_text_are_refused(
    messages: list[dict[str, Any]],
) -> None:
    with pytest.raises(ValueError, match="each message|a content|a part"):
        chat_request(messages)


def test_text_parts_become_lines_and_other_fields_go_along() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = chat_request([{"role": "user", "content": parts, "name": "è"}]).messages
    assert (message.content, message.fields) == ("a\nb", '{"name": "è"}')
