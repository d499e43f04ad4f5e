"""Read the parts of an upload, within limits, and make a trie of them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import numpy as np

from stemserve.proto.v1 import inference_pb2, tries_pb2
from stemserve.service.calls.tries.trie_registry import NewTrie
from stemserve.service.calls.validation import (
    check_characters,
    check_count,
    check_id,
    check_ttl,
)
from stemserve.service.calls.wire_tokens import check_known, decode_packed
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.constraints.token_trie import TokenTrie
from stemserve.service.constraints.trie_builder import TrieBuilder
from stemserve.service.errors import DeadlinePassed, InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.text.tokenizer import TokenizerPool

DIGEST_BYTES = 12
OFFSET_BYTES = 4
PART_BYTES = 512  # of a message, whatever it holds
LONGEST_PAUSE_S = 30.0  # between the messages of an upload, which holds memory
FIELD = "sequences"

Requests = AsyncIterator[tries_pb2.UploadTrieRequest]


class TrieReader:
    def __init__(
        self,
        pool: TokenizerPool,
        compiler: ConstraintCompiler,
        builder: TrieBuilder,
        limits: Limits,
        *,
        vocab_size: int,
    ) -> None:
        self._pool = pool
        self._compiler = compiler
        self._builder = builder
        self._limits = limits
        self._vocab_size = vocab_size

    async def read(
        self, tenant: str, requests: Requests, reserve: Callable[[int], None]
    ) -> NewTrie:
        """`reserve` is told of all bytes before they are kept. Raises RequestError."""
        first: tries_pb2.UploadTrieRequest | None = None
        parts, sequences = list[PackedTokens](), 0
        async for request in _without_pauses(requests):
            if first is None:
                first = tries_pb2.UploadTrieRequest(
                    trie_id=request.trie_id, ttl_seconds=request.ttl_seconds
                )
                check_id("trie_id", first.trie_id)
                check_ttl(first.ttl_seconds)
            elif request.trie_id or request.ttl_seconds:
                raise InvalidRequest("trie_id", "and ttl_seconds belong in the first message only")
            sequences += max(0, len(request.sequences.offsets) - 1) + len(request.texts)
            most = self._limits.max_token_sequences
            check_count(FIELD, sequences, "max_token_sequences", most)
            if request.HasField("sequences"):
                parts.append(await self._sequences(request.sequences, reserve))
            if request.texts:
                parts.append(await self._texts(request.texts, reserve))
        if first is None or not parts:
            raise InvalidRequest(FIELD, "needs sequences; none came")
        try:
            build = partial(self._build, parts)
            trie, digest = await self._compiler.made(tenant, "trie_id", build)
        finally:
            parts.clear()  # an error's traceback may keep them
        return NewTrie(trie_id=first.trie_id, trie=trie, digest=digest, ttl_s=first.ttl_seconds)

    async def _sequences(
        self, message: inference_pb2.PackedTokens, reserve: Callable[[int], None]
    ) -> PackedTokens:
        reserve(PART_BYTES + len(message.tokens) + OFFSET_BYTES * len(message.offsets))
        # Of a megabyte, some milliseconds.
        return await asyncio.to_thread(decode_packed, FIELD, message, self._vocab_size)

    async def _texts(self, texts: Sequence[str], reserve: Callable[[int], None]) -> PackedTokens:
        check_characters(sum(map(len, texts)), self._limits)
        packed = await self._pool.encode_continuations(texts)
        reserve(PART_BYTES + packed.tokens.nbytes + packed.indptr.nbytes)
        check_known("texts", packed.tokens, self._vocab_size)
        return packed

    def _build(self, parts: Sequence[PackedTokens]) -> tuple[TokenTrie, str]:
        """In a thread. Raises InvalidRequest."""
        trie = self._builder.build(FIELD, _joined(parts))
        state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for array in (trie.first_child, trie.tokens, trie.is_end):
            state.update(array.data)
        return trie, state.hexdigest()


async def _without_pauses(requests: Requests) -> Requests:
    while True:
        try:
            async with asyncio.timeout(LONGEST_PAUSE_S):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlinePassed(
                f"no message of the upload came for {LONGEST_PAUSE_S:g} s"
            ) from None
        yield request


def _joined(parts: Sequence[PackedTokens]) -> PackedTokens:
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([part.lengths for part in parts])
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return PackedTokens(tokens=np.concatenate([part.tokens for part in parts]), indptr=indptr)
