"""Make the client library's calls; tell a server the prefixes and the trie that it lacks."""

from typing import Any

from google.protobuf.message import Message

from stemserve.proto.v1 import prefixes_pb2
from stemserve.service.client.answers import Metadata, answer_of
from stemserve.service.client.errors import ClientError
from stemserve.service.client.prefixes import KnownPrefixes
from stemserve.service.client.routing import prefix_ids, route
from stemserve.service.client.tries import NO_TRIE, TrieCalls

NOT_KNOWN = "PREFIX_NOT_FOUND"  # the reason in a server's error


class Calls:
    """With `known` a call that names a prefix which its server lacks is made twice."""

    def __init__(
        self,
        prefixes: Any,
        tries: TrieCalls,
        *,
        known: KnownPrefixes | None,
        timeout_s: float | None,
    ) -> None:
        self._prefixes = prefixes
        self._tries = tries
        self._known = known
        self._timeout_s = timeout_s

    async def answer(self, method: Any, request: Message) -> Any:
        metadata, told = route(request), set[str]()
        while True:
            try:
                return await answer_of(method(request, timeout=self._timeout_s, metadata=metadata))
            except ClientError as error:
                if error.reason in told or not await self.told_again(error, request):
                    raise
                told.add(error.reason)

    async def told_again(self, error: ClientError, request: Message) -> bool:
        """Whether the server of `request` now has prefixes, or a trie, that it lacked."""
        if error.reason == NO_TRIE:
            return await self._tries.uploaded_again(request)
        if self._known is None or error.reason != NOT_KNOWN:
            return False
        told = False
        for prefix in self._known.with_parents(prefix_ids(request)):
            if not await self._has(prefix.prefix_id, route(request)):
                register = self._prefixes.Register
                metadata = route(request)  # the call's server, whatever the prefix's own
                await answer_of(register(prefix, timeout=self._timeout_s, metadata=metadata))
                told = True
        return told

    async def _has(self, prefix_id: str, metadata: Metadata) -> bool:
        """Registering what is there would add an owner to it."""
        get = prefixes_pb2.GetRequest(prefix_id=prefix_id)
        try:
            await answer_of(self._prefixes.Get(get, timeout=self._timeout_s, metadata=metadata))
        except ClientError as error:
            if error.reason != NOT_KNOWN:
                raise
            return False
        return True
