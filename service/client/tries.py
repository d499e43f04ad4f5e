"""The client library's calls about tries: sets of sequences that outputs are held to."""

from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message

from stemserve.proto.v1 import inference_pb2, info_pb2, tries_pb2
from stemserve.service.client.answers import Metadata, answer_of, pages_of
from stemserve.service.client.results import Trie
from stemserve.service.client.routing import route
from stemserve.service.packed_tokens import PackedTokens, pack
from stemserve.service.request import Int32

NO_TRIE = "TRIE_NOT_FOUND"  # the reason in a server's error
# Of one message: half a megabyte, which a server decodes in some milliseconds.
MESSAGE_SEQUENCES = 1 << 14
MESSAGE_TOKENS = 1 << 17
MESSAGE_TEXT = 1 << 19  # characters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    sequences: PackedTokens | Sequence[str]
    ttl_seconds: float


class TrieCalls:
    def __init__(self, tries: Any, *, remembers: bool, timeout_s: float | None) -> None:
        self._tries = tries
        self._timeout_s = timeout_s
        self._known: dict[str, _Known] | None = {} if remembers else None

    async def upload(
        self,
        sequences: PackedTokens | Sequence[Int32] | Sequence[str],
        *,
        trie_id: str = "",
        ttl_seconds: float = 0.0,
    ) -> Trie:
        """Token ids, or texts as they continue a prompt; in any number. Raises ClientError, and
        TypeError for one text in place of several.

        With `Client(reregister=True)` they are kept here, for servers that do not know them.
        """
        known = _Known(sequences=_packed(sequences), ttl_seconds=ttl_seconds)
        trie = await self._upload(trie_id, known, ())
        if self._known is not None:
            self._known[trie.trie_id] = known
        return trie

    async def get(self, trie_id: str) -> Trie:
        request = tries_pb2.GetTrieRequest(trie_id=trie_id)
        call = self._tries.GetTrie(request, timeout=self._timeout_s)
        response: tries_pb2.GetTrieResponse = await answer_of(call)
        return _trie(response.trie)

    async def list(self) -> tuple[Trie, ...]:
        """All of them, page by page. Behind a router: those of one server."""

        def read(token: str) -> Awaitable[tries_pb2.ListTriesResponse]:
            request = tries_pb2.ListTriesRequest(page_token=token)
            return answer_of(self._tries.ListTries(request, timeout=self._timeout_s))

        return tuple([_trie(one) async for page in pages_of(read) for one in page.tries])

    async def delete(self, trie_id: str) -> None:
        """Behind a router: on one server; others drop it when nobody has used it for its TTL."""
        if self._known is not None:
            self._known.pop(trie_id, None)
        request = tries_pb2.DeleteTrieRequest(trie_id=trie_id)
        await answer_of(self._tries.DeleteTrie(request, timeout=self._timeout_s))

    async def uploaded_again(self, request: Message) -> bool:
        """Whether the server to which `request` goes has its trie now."""
        trie_id = _trie_id(request)
        known = None if self._known is None else self._known.get(trie_id)
        if known is None:
            return False
        await self._upload(trie_id, known, route(request))
        return True

    async def _upload(self, trie_id: str, known: _Known, metadata: Metadata) -> Trie:
        messages = upload_messages(known.sequences, trie_id=trie_id, ttl_seconds=known.ttl_seconds)
        call = self._tries.UploadTrie(messages, timeout=self._timeout_s, metadata=metadata)
        response: tries_pb2.UploadTrieResponse = await answer_of(call)
        return _trie(response.trie)


async def upload_messages(
    sequences: PackedTokens | Sequence[str], *, trie_id: str, ttl_seconds: float
) -> AsyncGenerator[tries_pb2.UploadTrieRequest, None]:
    """Of one call of UploadTrie."""
    yield tries_pb2.UploadTrieRequest(trie_id=trie_id, ttl_seconds=ttl_seconds)
    for part in _parts(sequences):
        yield part


def _packed(
    sequences: PackedTokens | Sequence[Int32] | Sequence[str],
) -> PackedTokens | Sequence[str]:
    if isinstance(sequences, PackedTokens):
        return sequences
    if isinstance(sequences, str):
        raise TypeError("sequences is one text; give a sequence of texts")
    texts = [each for each in sequences if isinstance(each, str)]
    if texts:
        if len(texts) < len(sequences):
            raise TypeError("sequences are all texts, or all token ids")
        return texts
    ids = [each for each in sequences if not isinstance(each, str)]
    return pack([np.asarray(each, np.int32) for each in ids])


def _parts(sequences: PackedTokens | Sequence[str]) -> Iterator[tries_pb2.UploadTrieRequest]:
    if isinstance(sequences, PackedTokens):
        yield from _token_parts(sequences)
        return
    texts, characters = list[str](), 0
    for text in sequences:
        if texts and (len(texts) == MESSAGE_SEQUENCES or characters + len(text) > MESSAGE_TEXT):
            yield tries_pb2.UploadTrieRequest(texts=texts)
            texts, characters = [], 0
        texts.append(text)
        characters += len(text)
    if texts:
        yield tries_pb2.UploadTrieRequest(texts=texts)


def _token_parts(sequences: PackedTokens) -> Iterator[tries_pb2.UploadTrieRequest]:
    indptr, start = sequences.indptr, 0
    while start < len(sequences):
        room = np.int32(int(indptr[start]) + MESSAGE_TOKENS)
        last = int(np.searchsorted(indptr, room, side="right")) - 1
        stop = max(start + 1, min(last, start + MESSAGE_SEQUENCES))
        tokens = sequences.tokens[indptr[start] : indptr[stop]]
        packed = inference_pb2.PackedTokens(
            tokens=tokens.astype("<u4").tobytes(),
            offsets=(indptr[start : stop + 1] - indptr[start]).tolist(),
        )
        yield tries_pb2.UploadTrieRequest(sequences=packed)
        start = stop


def _trie_id(request: Message) -> str:
    match request:
        case inference_pb2.GenerateRequest():
            return request.trie_id
        case info_pb2.ExplainRequest():
            return request.generate.trie_id
        case _:
            return ""


def _trie(message: tries_pb2.Trie) -> Trie:
    return Trie(
        trie_id=message.trie_id,
        sequences=message.sequences,
        nodes=message.nodes,
        num_bytes=message.bytes,
        ttl_seconds=message.ttl_seconds,
        expires_unix_seconds=message.expires_unix_seconds,
    )
