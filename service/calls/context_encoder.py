"""Token ids of the contexts and prompts that requests name."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.chat_prompt import ChatPrompts
from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry, RegisteredPrefix
from stemserve.service.calls.validation import check_tokens
from stemserve.service.calls.wire_tokens import TOKEN_BYTES, check_known, decode_tokens
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import NO_TRUNK, Int32, Trunk
from stemserve.service.text.tokenizer import TokenizerPool

NO_TOKENS: Int32 = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedContext:
    tokens: Int32
    trunk: Trunk  # of the prefix that it continues


class ContextEncoder:
    """A registered prefix, then text or tokens. Token ids are taken as they are, without a BOS."""

    def __init__(
        self, pool: TokenizerPool, prefixes: PrefixRegistry, *, vocab_size: int, limits: Limits
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._prefixes = prefixes
        self._vocab_size = vocab_size
        self._chats = ChatPrompts(pool, vocab_size=vocab_size, limits=limits)

    async def encode(
        self, field: str, contexts: Sequence[inference_pb2.Context], caller: Caller
    ) -> tuple[EncodedContext, ...]:
        if all(context.tokens and not context.prefix_id for context in contexts):
            return self._tokens(field, contexts)
        prefixes = [self._prefix(context, caller) for context in contexts]
        starts = [NO_TOKENS if prefix is None else prefix.tokens for prefix in prefixes]
        sent = sum(len(context.tokens) for context in contexts) // TOKEN_BYTES
        check_tokens(field, sum(map(len, starts)) + sent, self._limits)
        for index, context in enumerate(contexts):
            if context.tokens:
                tokens = decode_tokens(f"{field}[{index}].tokens", context.tokens, self._vocab_size)
                starts[index] = np.concatenate((starts[index], tokens))
        await self._add_fronts(field, contexts, starts)
        await self._add_continuations(field, contexts, starts)
        check_tokens(field, sum(map(len, starts)), self._limits)
        return tuple(
            EncodedContext(tokens=tokens, trunk=NO_TRUNK if prefix is None else prefix.trunk)
            for tokens, prefix in zip(starts, prefixes, strict=True)
        )

    def _tokens(
        self, field: str, contexts: Sequence[inference_pb2.Context]
    ) -> tuple[EncodedContext, ...]:
        """Of contexts that are token ids and nothing else."""
        blobs = [context.tokens for context in contexts]
        check_tokens(field, sum(map(len, blobs)) // TOKEN_BYTES, self._limits)
        return tuple(
            EncodedContext(
                tokens=decode_tokens(f"{field}[{index}].tokens", blob, self._vocab_size),
                trunk=NO_TRUNK,
            )
            for index, blob in enumerate(blobs)
        )

    async def encode_chat(self, field: str, chat: inference_pb2.Chat) -> EncodedContext:
        """A chat continues no prefix; the tokens that it shares with others are found anyway."""
        tokens = await self._chats.encode(field, chat)
        check_tokens(field, len(tokens), self._limits)
        return EncodedContext(tokens=tokens, trunk=NO_TRUNK)

    async def encode_around(
        self, field: str, chat: inference_pb2.Chat, marker: str
    ) -> tuple[EncodedContext, Int32]:
        """A chat up to the marker, and what its template writes behind it."""
        before, behind = await self._chats.encode_around(field, chat, marker)
        check_tokens(field, len(before) + len(behind), self._limits)
        return EncodedContext(tokens=before, trunk=NO_TRUNK), behind

    async def encode_items(self, field: str, texts: Sequence[str]) -> PackedTokens:
        """Items of a chat."""
        return await self._chats.encode_items(field, texts)

    def _prefix(self, context: inference_pb2.Context, caller: Caller) -> RegisteredPrefix | None:
        return self._prefixes.use(caller, context.prefix_id) if context.prefix_id else None

    async def _add_fronts(
        self, field: str, contexts: Sequence[inference_pb2.Context], starts: list[Int32]
    ) -> None:
        """An empty context is an empty text: it too begins with a BOS where there is one."""
        rows = [
            index
            for index, context in enumerate(contexts)
            if not context.prefix_id and context.WhichOneof("continuation") != "tokens"
        ]
        if not any(contexts[row].text for row in rows) and self._pool.tokenizer.bos_id is None:
            return
        fronts = await self._pool.encode_front([contexts[row].text for row in rows])
        for row, tokens in zip(rows, fronts, strict=True):
            starts[row] = check_known(f"{field}[{row}].text", tokens, self._vocab_size)

    async def _add_continuations(
        self, field: str, contexts: Sequence[inference_pb2.Context], starts: list[Int32]
    ) -> None:
        rows = [i for i, context in enumerate(contexts) if context.prefix_id and context.text]
        if not rows:
            return
        packed = await self._pool.encode_continuations([contexts[row].text for row in rows])
        for index, row in enumerate(rows):
            tokens = check_known(f"{field}[{row}].text", packed[index], self._vocab_size)
            starts[row] = np.concatenate((starts[row], tokens))
