"""The Tries service."""

import time
from collections.abc import AsyncIterator, Callable

from stemserve.proto.v1 import tries_pb2, tries_pb2_grpc
from stemserve.service.caller import current_caller
from stemserve.service.calls.prefixes.prefixes_servicer import DEFAULT_PAGE, LARGEST_PAGE
from stemserve.service.calls.tries.trie_registry import RegisteredTrie, TrieRegistry
from stemserve.service.calls.tries.trie_upload import TrieReader
from stemserve.service.calls.validation import check_id
from stemserve.service.serving.call_status import Context


class TriesServicer(tries_pb2_grpc.TriesServicer):
    def __init__(
        self, registry: TrieRegistry, reader: TrieReader, *, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._clock = clock

    async def UploadTrie(
        self, request_iterator: AsyncIterator[tries_pb2.UploadTrieRequest], context: Context
    ) -> tries_pb2.UploadTrieResponse:
        caller = current_caller()
        with self._registry.uploading(caller) as reserve:
            new = await self._reader.read(caller.tenant, request_iterator, reserve)
        trie = self._registry.put(caller, new)
        return tries_pb2.UploadTrieResponse(trie=self._message(trie))

    async def GetTrie(
        self, request: tries_pb2.GetTrieRequest, context: Context
    ) -> tries_pb2.GetTrieResponse:
        check_id("trie_id", request.trie_id)
        trie = self._registry.get(current_caller(), request.trie_id)
        return tries_pb2.GetTrieResponse(trie=self._message(trie))

    async def ListTries(
        self, request: tries_pb2.ListTriesRequest, context: Context
    ) -> tries_pb2.ListTriesResponse:
        check_id("page_token", request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, LARGEST_PAGE)
        page = self._registry.page(current_caller(), after=request.page_token, count=size + 1)
        more = len(page) > size
        return tries_pb2.ListTriesResponse(
            tries=map(self._message, page[:size]),
            next_page_token=page[size - 1].trie_id if more else "",
        )

    async def DeleteTrie(
        self, request: tries_pb2.DeleteTrieRequest, context: Context
    ) -> tries_pb2.DeleteTrieResponse:
        check_id("trie_id", request.trie_id)
        self._registry.delete(current_caller(), request.trie_id)
        return tries_pb2.DeleteTrieResponse()

    def _message(self, kept: RegisteredTrie) -> tries_pb2.Trie:
        return tries_pb2.Trie(
            trie_id=kept.trie_id,
            sequences=kept.trie.sequences,
            nodes=len(kept.trie.tokens),
            bytes=kept.trie.num_bytes,
            ttl_seconds=kept.ttl_s,
            expires_unix_seconds=time.time() + kept.expires_s - self._clock(),
        )
