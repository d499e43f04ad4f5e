"""Who makes a call, and whose cached prefixes it may share."""

import hashlib
import hmac
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant: str  # empty where callers have no identity
    salt: bytes  # of the prefix tree: callers share cached pages only under one salt
    group: str = ""  # tenants of one sharing group share the prefixes that they register as shared
    group_salt: bytes = b""  # of their full pages
    max_prefix_bytes: int = 0  # of KV that its registered prefixes take; 0: no limit
    max_trie_bytes: int = 0  # of memory that its tries take; 0: no limit
    max_priority: int | None = None  # of its calls; None: no limit


ANYONE = Caller(tenant="", salt=b"")

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def current_caller() -> Caller:
    """The caller of the RPC that runs in this task."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """For the task of one RPC."""
    _caller.set(caller)


def salt_of(server_key: bytes, owner: str) -> bytes:
    """[32] bytes. Made here from a secret and never taken from a request, so that no client can
    name another's salt (vLLM's CVE-2025-46570 is what a guessable one allows)."""
    return hmac.digest(server_key, owner.encode(), hashlib.sha256)
