"""Every refusal of a request, and the one table that turns it into a gRPC status.

RequestError
├── Unauthenticated       no credential, or one that names no tenant
├── InvalidRequest        a field is wrong; the caller must change the request
├── PrefixNotFound        unknown, expired or released prefix id
├── PrefixExists          the asked-for id names other content
├── NotPrefixOwner        a shared prefix that other tenants of the group registered
├── PrefixesFull          the registry has no room for another prefix
├── TrieNotFound          unknown, expired or deleted trie id
├── TrieExists            the asked-for id names another set
├── TriesFull             there is no room for another trie
├── WrongModelKind        the model has no such head
├── QueueFull             retry later
├── QuotaExceeded         the tenant is over its share; retry later
├── SlowReader            the client takes its stream too slowly
├── NeverFits             larger than the KV pool, or than the memory; retrying cannot help
├── DeadlinePassed        the deadline passed before the work was done
├── NotReady              starting, draining, or the worker was lost; safe to retry
└── EngineFault           our bug, or logits that are not finite
"""

from collections.abc import Mapping

import grpc


class RequestError(Exception):
    """A request that is refused. The message says what was found and what to do."""


class InvalidRequest(RequestError):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Unauthenticated(RequestError):
    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # of the metric


class PrefixNotFound(RequestError):
    def __init__(self, prefix_id: str) -> None:
        super().__init__(f"prefix {prefix_id!r} is not registered; call Prefixes.Register first")


class PrefixExists(RequestError):
    def __init__(self, prefix_id: str) -> None:
        super().__init__(
            f"prefix {prefix_id!r} exists with other content; release it or use another id"
        )


class NotPrefixOwner(RequestError):
    def __init__(self, prefix_id: str) -> None:
        super().__init__(
            f"prefix {prefix_id!r} is shared by tenants who registered it; only they may renew or "
            "release it"
        )


class PrefixesFull(RequestError):
    pass


class TrieNotFound(RequestError):
    def __init__(self, trie_id: str) -> None:
        super().__init__(f"trie {trie_id!r} is not there; call Tries.UploadTrie first")


class TrieExists(RequestError):
    def __init__(self, trie_id: str) -> None:
        super().__init__(
            f"trie {trie_id!r} exists with other sequences; delete it or use another id"
        )


class TriesFull(RequestError):
    pass


class WrongModelKind(RequestError):
    pass


class QueueFull(RequestError):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(RequestError):
    def __init__(self, message: str, *, subject: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.subject = subject  # which quota
        self.retry_after_s = retry_after_s


class SlowReader(RequestError):
    pass


class NeverFits(RequestError):
    pass


class DeadlinePassed(RequestError):
    pass


class NotReady(RequestError):
    pass


class EngineFault(RequestError):
    pass


STATUS: Mapping[type[RequestError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    PrefixNotFound: grpc.StatusCode.NOT_FOUND,
    PrefixExists: grpc.StatusCode.ALREADY_EXISTS,
    NotPrefixOwner: grpc.StatusCode.PERMISSION_DENIED,
    PrefixesFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TrieNotFound: grpc.StatusCode.NOT_FOUND,
    TrieExists: grpc.StatusCode.ALREADY_EXISTS,
    TriesFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    WrongModelKind: grpc.StatusCode.UNIMPLEMENTED,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NeverFits: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    EngineFault: grpc.StatusCode.INTERNAL,
}
