"""The prefixes that a client registered, to register them again on a server that lacks them."""

from collections.abc import Iterable

from stemserve.proto.v1 import prefixes_pb2
from stemserve.service.client.routing import ROOT_END, digest, root

LONGEST_ROOT = 64  # characters; the whole id must stay within the server's bound


class KnownPrefixes:
    def __init__(self) -> None:
        self._requests: dict[str, prefixes_pb2.RegisterRequest] = {}

    def __contains__(self, prefix_id: str) -> bool:
        return prefix_id in self._requests

    def remember(self, request: prefixes_pb2.RegisterRequest) -> None:
        self._requests[request.prefix_id] = request

    def forget(self, prefix_id: str) -> None:
        self._requests.pop(prefix_id, None)

    def with_parents(self, prefix_ids: Iterable[str]) -> list[prefixes_pb2.RegisterRequest]:
        """Those of them that are known, each behind its parents."""
        found: dict[str, prefixes_pb2.RegisterRequest] = {}
        for prefix_id in prefix_ids:
            chain: list[prefixes_pb2.RegisterRequest] = []
            while prefix_id in self._requests and prefix_id not in found:
                chain.append(self._requests[prefix_id])
                prefix_id = chain[-1].parent_prefix_id
            found |= {request.prefix_id: request for request in reversed(chain)}
        return list(found.values())


def with_id(request: prefixes_pb2.RegisterRequest) -> prefixes_pb2.RegisterRequest:
    """A copy that has an id, made of its content where it has none.

    A router must know the id before the server could make it. Below a parent it begins with the
    id of the root, so that all of a tree go to one server.
    """
    named = prefixes_pb2.RegisterRequest()
    named.CopyFrom(request)
    if not named.prefix_id:
        parent = named.parent_prefix_id
        shared = "shared" if named.shared else ""
        own = digest(parent, shared, named.text, named.tokens)
        below = parent and len(root(parent)) <= LONGEST_ROOT
        named.prefix_id = f"{root(parent)}{ROOT_END}{own}" if below else own
    return named
