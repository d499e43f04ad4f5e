"""Token ids of the messages of a chat."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.chat_validation import check_kwargs, read_json
from stemserve.service.calls.wire_tokens import check_known
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import Int32
from stemserve.service.text.chat_encoder import ChatEncoder
from stemserve.service.text.chat_marks import CUT
from stemserve.service.text.chat_renderer import ChatRenderer
from stemserve.service.text.chat_template import ChatTemplate
from stemserve.service.text.tokenizer import TokenizerPool

T = TypeVar("T")
# A template may put a special token together of its role: <|user|>. These it is meant to.
ROLES = frozenset(
    {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"}
    | {"observation"}
)


class ChatPrompts:
    """The model's template writes the text, on a tokenizer thread that waits for its process."""

    def __init__(self, pool: TokenizerPool, *, vocab_size: int, limits: Limits) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._turn = asyncio.Semaphore(1)  # so that a slow template holds up one thread only
        template = pool.tokenizer.chat_template
        self._renderer = _renderer(template, limits) if template is not None else None

    async def encode(self, field: str, chat: inference_pb2.Chat) -> Int32:
        """Raises RequestError."""
        encoder = self._pool.tokenizer.chat_encoder
        write = partial(_write, chat, encoder, self._renderer_of(field))
        written = await self._in_turn(write, characters=chat.ByteSize())
        return await self._tokens(field, written, at_front=True)

    async def encode_around(
        self, field: str, chat: inference_pb2.Chat, marker: str
    ) -> tuple[Int32, Int32]:
        """What the template writes before the marker, and behind it. Raises RequestError."""
        encoder = self._pool.tokenizer.chat_encoder
        write = partial(_write_around, chat, marker, encoder, self._renderer_of(field))
        before, behind = await self._in_turn(write, characters=chat.ByteSize())
        return (
            await self._tokens(field, before, at_front=True),
            await self._tokens(field, behind, at_front=False),
        )

    async def encode_items(self, field: str, texts: Sequence[str]) -> PackedTokens:
        """Texts in a chat: special tokens in them stay text. Raises RequestError."""
        encode = partial(self._pool.tokenizer.chat_encoder.encode_texts, texts)
        packed = await self._pool.run(encode, characters=sum(map(len, texts)))
        check_known(field, packed.tokens, self._vocab_size)
        return packed

    async def _tokens(self, field: str, written: str, *, at_front: bool) -> Int32:
        encode = partial(self._pool.tokenizer.chat_encoder.encode, written, at_front=at_front)
        tokens = await self._pool.run(encode, characters=len(written))
        return check_known(field, tokens, self._vocab_size)

    def _renderer_of(self, field: str) -> ChatRenderer:
        if self._renderer is None:
            raise InvalidRequest(
                field, "this model has no chat template; write the prompt and send it as text"
            )
        return self._renderer

    async def _in_turn(self, work: Callable[[], T], *, characters: int) -> T:
        """A caller that leaves does not end its turn: the thread is still there."""
        await self._turn.acquire()
        task = asyncio.ensure_future(self._pool.run(work, characters=characters))

        def done(ended: "asyncio.Future[T]") -> None:
            self._turn.release()
            if not ended.cancelled():
                ended.exception()  # seen, also where nobody waits any more

        task.add_done_callback(done)
        return await asyncio.shield(task)


def _renderer(template: ChatTemplate, limits: Limits) -> ChatRenderer:
    return ChatRenderer(
        template,
        max_characters=limits.max_text_characters,
        max_milliseconds=limits.max_chat_render_ms,
    )


def _write(chat: inference_pb2.Chat, encoder: ChatEncoder, renderer: ChatRenderer) -> str:
    """What the template makes of the chat, with stand-ins."""
    variables = encoder.texts.hide(_variables(chat, encoder))
    if chat.continue_final_message:
        variables["messages"][-1]["content"] = _with_cut(variables["messages"][-1]["content"])
    written = _rendered(variables, encoder, renderer)
    return _cut(written, chat.messages[-1].content) if chat.continue_final_message else written


def _write_around(
    chat: inference_pb2.Chat, marker: str, encoder: ChatEncoder, renderer: ChatRenderer
) -> tuple[str, str]:
    variables = encoder.texts.hide(_variables(chat, encoder))
    for index, message in enumerate(chat.messages):
        before, found, behind = message.content.partition(marker)
        if found:
            around = encoder.texts.hide([before, behind])
            variables["messages"][index]["content"] = CUT.join(around)
    parts = _rendered(variables, encoder, renderer).split(CUT)
    if len(parts) != 2:
        raise InvalidRequest(
            "item_marker", f"the model's chat template shows that message {len(parts) - 1} times"
        )
    return parts[0], parts[1]


def _rendered(variables: dict[str, Any], encoder: ChatEncoder, renderer: ChatRenderer) -> str:
    try:
        return renderer.render(variables)
    except InvalidRequest as refusal:
        problem = encoder.texts.restore(refusal.problem).replace(CUT, "")
        raise InvalidRequest(refusal.field, problem) from refusal


def _variables(chat: inference_pb2.Chat, encoder: ChatEncoder) -> dict[str, Any]:
    generation = not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        generation = chat.add_generation_prompt
    kwargs: dict[str, Any] = (
        read_json("chat.chat_template_kwargs", chat.chat_template_kwargs, dict) or {}
    )
    check_kwargs(kwargs)
    return {
        "documents": None,
        **kwargs,
        "messages": [_message(chat, index, encoder) for index in range(len(chat.messages))],
        "tools": read_json("chat.tools", chat.tools, list),
        "add_generation_prompt": generation,
    }


def _message(chat: inference_pb2.Chat, index: int, encoder: ChatEncoder) -> dict[str, Any]:
    message, field = chat.messages[index], f"chat.messages[{index}]"
    if message.role not in ROLES and (special := encoder.texts.inside(message.role)):
        raise InvalidRequest(f"{field}.role", f"{message.role!r} is a part of {special}")
    fields: dict[str, Any] = read_json(f"{field}.fields", message.fields, dict) or {}
    if taken := {"role", "content"} & fields.keys():
        raise InvalidRequest(f"{field}.fields", f"may not hold {min(taken)!r}")
    content = {"content": message.content} if message.HasField("content") else {}
    # As callers of other APIs write null for what is not there.
    more = {name: value for name, value in fields.items() if value is not None}
    return {"role": message.role, **content, **more}


def _with_cut(content: str) -> str:
    kept = content.rstrip()
    return kept + CUT + content[len(kept) :]


def _cut(written: str, content: str) -> str:
    """After the last message; the spaces at its end stay where the template kept them."""
    before, found, after = written.rpartition(CUT)
    if not found:
        raise InvalidRequest(
            "chat.continue_final_message",
            "the model's chat template does not show the last message as it is",
        )
    spaces = content[len(content.rstrip()) :]
    before = before.replace(CUT, "")
    return before + spaces if after.startswith(spaces) else before
