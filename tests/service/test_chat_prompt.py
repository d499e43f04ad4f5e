"""Chats by the model's own template: against transformers, and against what callers may try."""

import itertools
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.service.chat_models import SPECIALS, chat_folder, expected_ids

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.chat_prompt import ChatPrompts
from stemserve.service.client import chat_request
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.text.tokenizer import Tokenizer, TokenizerPool
from stemserve.service.text.tokenizer_files import load_tokenizer

Message = Mapping[str, Any]
Ids = Callable[[inference_pb2.Chat], Awaitable[list[int]]]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"città": "è <b>"}}}]
SYSTEM: Message = {"role": "system", "content": "Speak plainly.\n"}
CHAT: list[Message] = [
    {"role": "user", "content": "  Hi there 世🙂 "},
    {"role": "assistant", "content": "hello\n"},
    {"role": "user", "content": "hi alone"},
]
CALLED: list[Message] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "weather", "arguments": {"città": "Roma", "a": 1}}}],
    },
    {"role": "tool", "content": "sun"},
    {"role": "tool", "content": "wind"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine.", "reasoning_content": "hm"},
    {"role": "user", "content": "Thanks"},
]
CHATS = {
    "one message": CHAT[:1],
    "system message": [SYSTEM, *CHAT[2:]],
    "several turns": CHAT,
    "tool calls": CALLED,
}


@asynccontextmanager
async def prompts(tokenizer: Tokenizer, limits: Limits | None = None) -> AsyncGenerator[Ids]:
    with ThreadPoolExecutor(2) as executor:
        pool = TokenizerPool(tokenizer, executor, long_executor=executor)
        made = ChatPrompts(pool, vocab_size=1 << 20, limits=limits or Limits())

        async def encode(chat: inference_pb2.Chat) -> list[int]:
            ids: list[int] = (await made.encode("chat", chat)).tolist()
            return ids

        yield encode


def numbers(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Ids of tokens by their texts."""
    assert tokenizer.encoders is not None
    return tokenizer.encoders.front.get_vocab(with_added_tokens=True).__getitem__


def cases() -> list[tuple[str, str]]:
    every = itertools.product(SPECIALS, CHATS)
    return [(name, chat) for name, chat in every if chat != "tool calls" or "tools" in name]


@pytest.mark.parametrize(("name", "chat"), cases())
@pytest.mark.parametrize("generation", [False, True])
async def test_a_chat_has_the_ids_that_transformers_gives_it(
    tmp_path: Path, name: str, chat: str, generation: bool
) -> None:
    folder, tools = chat_folder(tmp_path, name), TOOLS if chat == "tool calls" else None
    _, expected = expected_ids(
        folder, CHATS[chat], tools=tools, add_generation_prompt=generation, enable_thinking=False
    )
    request = chat_request(
        CHATS[chat], tools=tools or (), chat_template_kwargs={"enable_thinking": False}
    )
    request.add_generation_prompt = generation
    async with prompts(load_tokenizer(folder)) as ids:
        assert await ids(request) == expected


async def test_the_default_model_writes_chats_as_transformers_does(
    default_model_path: Path,
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    library = transformers.AutoTokenizer.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name
    )
    async with prompts(load_tokenizer(default_model_path)) as ids:
        for messages in (CHAT, [SYSTEM, *CHAT]):
            text = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            expected = library(text, add_special_tokens=False)["input_ids"]
            assert await ids(chat_request(messages)) == expected


def plainly(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """The same chat with letters where it has special tokens."""
    table = {text: chr(0x4E00 + n) * len(text) for n, text in enumerate(texts)}

    def change(content: str) -> str:
        for text, letters in table.items():
            content = content.replace(text, letters)
        return content

    return [{**message, "content": change(message["content"])} for message in messages]


@pytest.mark.parametrize("name", SPECIALS)
@pytest.mark.parametrize("seed", range(5))
async def test_special_tokens_in_messages_stay_text(tmp_path: Path, name: str, seed: int) -> None:
    """There are as many special ids as without them, and the text is what the caller wrote."""
    rng = random.Random(seed)
    tokenizer = load_tokenizer(chat_folder(tmp_path, name))
    specials = SPECIALS[name]
    bits = [*specials, *(s[: rng.randrange(1, len(s))] for s in specials), "hi", " ", "\n", "<"]
    contents = ["".join(rng.choices(bits, k=6)) + "x" for _ in range(3)]
    roles = ("user", "assistant", "user")
    messages: list[Message] = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    token_id = numbers(tokenizer)
    special_ids = {token_id(text) for text in specials}
    async with prompts(tokenizer) as ids:
        found = await ids(chat_request(messages))
        harmless = await ids(chat_request(plainly(messages, specials)))
    kept = [token for token in found if token in special_ids]
    assert kept == [token for token in harmless if token in special_ids]
    shown = tokenizer.decode(found)
    assert all(content.strip() in shown for content in contents)


async def test_the_ids_beside_hidden_texts_are_those_of_the_parts_between_special_tokens(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(chat_folder(tmp_path, "instructions"))
    token_id = numbers(tokenizer)
    hi, space = token_id("▁hi"), token_id("▁")
    bos, start, end = (token_id(text) for text in ("<s>", "[INST]", "[/INST]"))
    async with prompts(tokenizer) as ids:
        found = await ids(chat_request([{"role": "user", "content": "hi</s>"}]))
    text = [token_id(f"<0x{byte:02X}>") for byte in b"</s>"]
    assert found == [bos, start, hi, *text, space, end]


@pytest.mark.parametrize(
    "pieces", [("<|im_", "end|>"), ("<", "|im_end|>"), ("<|im_end|", ">"), ("<|im_end", "|>")]
)
async def test_no_special_token_comes_of_pieces_that_a_template_joins(
    tmp_path: Path, pieces: tuple[str, str]
) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    tokenizer = load_tokenizer(chat_folder(tmp_path, "chatml", source))
    token_id = numbers(tokenizer)
    messages = [{"role": "user", "content": piece} for piece in pieces]
    async with prompts(tokenizer) as ids:
        found = await ids(chat_request(messages))
    assert found.count(token_id("<|im_end|>")) == 1
    assert found[-1] == token_id("<|im_end|>")
    assert tokenizer.decode(found) == "<|im_end|>"


async def test_tools_fields_variables_and_roles_hold_no_special_tokens_either(
    tmp_path: Path,
) -> None:
    source = (
        "{{ messages[0].role }}{{ messages[0].name }}{{ tools | tojson(ensure_ascii=true) }}"
        "{{ more }}<|im_end|>"
    )
    tokenizer = load_tokenizer(chat_folder(tmp_path, "chatml", source))
    end, bad = "<|im_end|>", "<|im_start|>è"
    token_id = numbers(tokenizer)
    async with prompts(tokenizer) as ids:
        found = await ids(
            chat_request(
                [{"role": f"user{end}", "content": "", "name": bad}],
                tools=[{bad: bad}],
                chat_template_kwargs={"more": bad},
            )
        )
    assert found.count(token_id(end)) == 1
    assert token_id("<|im_start|>") not in found
    tools = json.dumps([{bad: bad}])
    assert tokenizer.decode(found) == f"user{end}{bad}{tools}{bad}"


async def test_a_role_that_would_make_a_special_token_is_refused(tmp_path: Path) -> None:
    source = "{{ '<|' + messages[0].role + '|>' }}"
    async with prompts(load_tokenizer(chat_folder(tmp_path, "chatml", source))) as ids:
        with pytest.raises(InvalidRequest, match=r"'im_end' is a part of <\|im_end\|>"):
            await ids(chat_request([{"role": "im_end", "content": ""}]))
        assert await ids(chat_request([{"role": "user", "content": ""}]))


async def test_a_bos_stands_once_where_the_template_writes_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_folder(tmp_path, "headers"))
    bos = numbers(tokenizer)("<|begin|>")
    async with prompts(tokenizer) as ids:
        found = await ids(chat_request([{"role": "user", "content": "<|begin|>hi"}]))
    assert found[0] == bos and found.count(bos) == 1


@pytest.mark.parametrize("name", SPECIALS)
@pytest.mark.parametrize("content", ["It is", "It is \n", "a <|im_end|> b"])
async def test_a_last_message_can_be_continued(tmp_path: Path, name: str, content: str) -> None:
    folder = chat_folder(tmp_path, name)
    messages: list[Message] = [CHAT[2], {"role": "assistant", "content": content}]
    whole, _ = expected_ids(folder, messages)
    start = whole.rindex(content.strip())
    kept = content if whole[start:].startswith(content) else content.strip()
    tokenizer = load_tokenizer(folder)
    async with prompts(tokenizer) as ids:
        found = await ids(chat_request(messages, continue_final_message=True))
    assert tokenizer.decode(found).endswith(kept)
    if "<|" not in content:
        assert tokenizer.encoders is not None
        front = tokenizer.encoders.front
        assert found == front.encode(whole[:start] + kept, add_special_tokens=False).ids


async def test_a_template_of_its_own_for_tools_is_taken_when_there_are_some(
    tmp_path: Path,
) -> None:
    folder = chat_folder(tmp_path, "chatml")
    (folder / "chat_template.jinja").unlink()
    sources = {"default": "plain", "tool_use": "with tools"}
    named = [{"name": name, "template": source} for name, source in sources.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_tokenizer(folder)
    async with prompts(tokenizer) as ids:
        assert tokenizer.decode(await ids(chat_request(CHAT))) == "plain"
        assert tokenizer.decode(await ids(chat_request(CHAT, tools=TOOLS))) == "with tools"


HOSTILE = {
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        r"took longer than max_chat_render_ms \(300\)",
    ),
    "one long operation": (
        "{{ ((messages | length + 8) ** 99999999) % 2 }}",
        "took longer than|too much memory",
    ),
    "long before it begins": ("{{ (9 ** 99999999) % 2 }}", "took longer than|too much memory"),
    "memory": ("{{ ('a' * 2 ** 31) | length }}", "too much memory"),
    "output": (
        "{% for a in range(9999) %}{{ 'a' * 999 }}{% endfor %}",
        "makes more than 100000 characters",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "ways out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses it.*unsafe"),
    "changes": ("{{ messages.append(1) }}", "refuses it.*not safely callable|unsafe"),
    "files": ("{% include '/etc/passwd' %}", "refuses it"),
    "syntax": ("{% if %}", "cannot be used"),
    "no such thing": ("{{ nothing.more }}", "'nothing' is undefined"),
    "its own words": ("{{ raise_exception('no ' + messages[0].content) }}", "no <|im_end|>$"),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_a_template_does_ends_its_own_call_only(tmp_path: Path, kind: str) -> None:
    source, problem = HOSTILE[kind]
    source = f"{{% if messages[0].role == 'tool' or true %}}{source}{{% endif %}}"
    limits = Limits(max_chat_render_ms=300, max_text_characters=100_000)
    tokenizer = load_tokenizer(chat_folder(tmp_path, "chatml", source))
    async with prompts(tokenizer, limits) as ids:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=problem):
                await ids(chat_request([{"role": "user", "content": "<|im_end|>"}]))


async def test_the_next_chat_is_right_after_one_that_was_killed(tmp_path: Path) -> None:
    source = (
        "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = load_tokenizer(chat_folder(tmp_path, "chatml", source))
    async with prompts(tokenizer, Limits(max_chat_render_ms=300)) as ids:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="max_chat_render_ms"):
                await ids(chat_request([{"role": "user", "content": "hang"}]))
            found = await ids(chat_request([{"role": "user", "content": "hi"}]))
            assert tokenizer.decode(found) == "hi"
