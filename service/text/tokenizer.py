"""Text to token ids and back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

import numpy as np
import tokenizers

from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import PackedTokens, offsets
from stemserve.service.request import Int32
from stemserve.service.text.chat_encoder import ChatEncoder
from stemserve.service.text.chat_template import ChatTemplate

LONG_CHARACTERS = 1 << 16  # tens of milliseconds
T = TypeVar("T")
Admit = Callable[[int], Awaitable[None]]  # raises RequestError where so many tokens are refused


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """The same tokenizer for the front of a sequence and for what continues it.

    They differ where a tokenizer puts a space before a text: only the front gets one.
    """

    front: tokenizers.Tokenizer
    continuation: tokenizers.Tokenizer


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The parts of a sequence are tokenised one by one and their ids joined.

    So inline text, a registered prefix and token ids agree. Where the tokenizer adds a BOS, there
    is one, at the front of a sequence that begins with text; it is dropped from all other text.
    """

    encoders: Encoders | None  # None: this model came without a tokenizer
    token_bytes: tuple[bytes, ...]  # by token id
    bos_id: int | None = None  # None: the tokenizer adds none
    eos_ids: frozenset[int] = frozenset()
    chat_template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def _bos(self) -> Int32:
        return np.array([] if self.bos_id is None else [self.bos_id], dtype=np.int32)

    @cached_property
    def chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self._encoders.front)

    def encode_front(self, texts: Sequence[str]) -> tuple[Int32, ...]:
        packed = self._encode(self._encoders.front, texts)
        return tuple(np.concatenate((self._bos, packed[i])) for i in range(len(texts)))

    def encode_continuations(self, texts: Sequence[str]) -> PackedTokens:
        return self._encode(self._encoders.continuation, texts)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens: without special tokens, U+FFFD for what is no character."""
        table = self.token_bytes
        parts = [table[token_id] for token_id in token_ids if token_id < len(table)]
        return b"".join(parts).decode(errors="replace")

    @property
    def _encoders(self) -> Encoders:
        if self.encoders is None:
            raise InvalidRequest("text", "this model has no tokenizer; send token ids")
        return self.encoders

    def _encode(self, encoder: tokenizers.Tokenizer, texts: Sequence[str]) -> PackedTokens:
        encodings = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        indptr = offsets(lengths)
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(indptr[-1]))
        if self.bos_id is None:
            return PackedTokens(tokens=tokens, indptr=indptr)
        kept = tokens != self.bos_id
        return PackedTokens(tokens=tokens[kept], indptr=offsets(kept.astype(np.int32))[indptr])


async def anything(least_tokens: int) -> None:
    """Refuses nothing."""


class TokenizerPool:
    """Encodes in a few threads, so that the event loop never waits for a long text. Long texts have
    threads of their own, so that short ones never wait for them either."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        executor: ThreadPoolExecutor,
        *,
        long_executor: ThreadPoolExecutor,
        admit: Admit = anything,
    ) -> None:
        """`admit` is asked before a long text takes a thread, with the fewest tokens it can be."""
        self.tokenizer = tokenizer
        self._executor = executor
        self._long_executor = long_executor
        self._admit = admit
        self._longest_token = max(map(len, tokenizer.token_bytes), default=1)  # bytes

    async def encode_front(self, texts: Sequence[str]) -> tuple[Int32, ...]:
        if not texts:
            return ()
        return await self._run(self.tokenizer.encode_front, texts)

    async def encode_continuations(self, texts: Sequence[str]) -> PackedTokens:
        if not any(texts):
            count = len(texts) + 1
            return PackedTokens(
                tokens=np.zeros(0, dtype=np.int32), indptr=np.zeros(count, dtype=np.int32)
            )
        # A query over many prefixes comes as often as there are prefixes.
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        packed = await self._run(self.tokenizer.encode_continuations, list(numbers))
        if len(numbers) == len(texts):
            return packed
        return packed.take(np.array([numbers[text] for text in texts], dtype=np.int32))

    async def _run(self, encode: Callable[[Sequence[str]], T], texts: Sequence[str]) -> T:
        return await self.run(partial(encode, texts), characters=sum(map(len, texts)))

    async def run(self, work: Callable[[], T], *, characters: int) -> T:
        """Work on that much text."""
        executor = self._executor
        if characters > LONG_CHARACTERS:
            await self._admit(characters // max(1, self._longest_token))
            executor = self._long_executor
        return await asyncio.get_running_loop().run_in_executor(executor, work)
