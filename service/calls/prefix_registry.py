"""Names for token sequences that many requests continue, each with its lifetime."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from stemserve.service.errors import PrefixesFull, PrefixExists, PrefixNotFound
from stemserve.service.request import Int32

ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryBounds:
    max_prefixes: int = 10_000
    max_tokens: int = 16 << 20  # of all prefixes together, parents counted in each child
    default_ttl_s: float = 3_600.0  # 0: no expiry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegisteredPrefix:
    prefix_id: str
    parent_id: str  # empty for none
    tokens: Int32  # with all parents
    ttl_s: float  # sliding; 0: no expiry
    expires_s: float  # on the registry's clock; infinite without expiry
    owners: int = 1  # registrations that were not released


class PrefixRegistry:
    """Ids are unique under a client (`owner`), and say nothing to another.

    A prefix holds its parents' tokens, so releasing a parent leaves its children as they are.
    Registering the same content again under the same id adds an owner; the id is gone when the last
    owner released it, or when nobody used it for its TTL.
    """

    def __init__(self, bounds: RegistryBounds, *, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._clock = clock
        self._prefixes: dict[tuple[str, str], RegisteredPrefix] = {}
        self._tokens = 0

    def register(
        self, owner: str, prefix_id: str, tokens: Int32, *, parent_id: str, ttl_s: float
    ) -> RegisteredPrefix:
        """Without an id, the content's own: the same content then always has the same id."""
        ttl_s = ttl_s or self._bounds.default_ttl_s
        key = (owner, prefix_id or _content_id(tokens))
        known = self._live(key)
        if known is None:
            self._make_room(len(tokens))
            self._tokens += len(tokens)
            known = RegisteredPrefix(
                prefix_id=key[1],
                parent_id=parent_id,
                tokens=tokens,
                ttl_s=ttl_s,
                expires_s=0.0,
                owners=0,
            )
        elif not np.array_equal(known.tokens, tokens):
            raise PrefixExists(prefix_id)
        longest = 0.0 if not known.ttl_s or not ttl_s else max(known.ttl_s, ttl_s)
        return self._keep(key, replace(known, owners=known.owners + 1, ttl_s=longest))

    def get(self, owner: str, prefix_id: str) -> RegisteredPrefix:
        known = self._live((owner, prefix_id))
        if known is None:
            raise PrefixNotFound(prefix_id)
        return known

    def use(self, owner: str, prefix_id: str) -> RegisteredPrefix:
        """Get, and start the TTL anew."""
        return self._keep((owner, prefix_id), self.get(owner, prefix_id))

    def renew(self, owner: str, prefix_id: str, *, ttl_s: float) -> RegisteredPrefix:
        """0 keeps the TTL as it is."""
        known = self.get(owner, prefix_id)
        return self._keep((owner, prefix_id), replace(known, ttl_s=ttl_s or known.ttl_s))

    def release(self, owner: str, prefix_id: str) -> None:
        known = self.get(owner, prefix_id)
        if known.owners > 1:
            self._prefixes[owner, prefix_id] = replace(known, owners=known.owners - 1)
        else:
            self._drop((owner, prefix_id))

    def page(self, owner: str, *, after: str, count: int) -> tuple[RegisteredPrefix, ...]:
        """The next prefixes by id."""
        self._drop_expired()
        ids = sorted(prefix_id for client, prefix_id in self._prefixes if client == owner)
        start = bisect_right(ids, after)
        return tuple(self._prefixes[owner, prefix_id] for prefix_id in ids[start : start + count])

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._prefixes)

    def _keep(self, key: tuple[str, str], prefix: RegisteredPrefix) -> RegisteredPrefix:
        expires_s = self._clock() + prefix.ttl_s if prefix.ttl_s else inf
        self._prefixes[key] = kept = replace(prefix, expires_s=expires_s)
        return kept

    def _live(self, key: tuple[str, str]) -> RegisteredPrefix | None:
        known = self._prefixes.get(key)
        if known is not None and known.expires_s <= self._clock():
            self._drop(key)
            return None
        return known

    def _drop(self, key: tuple[str, str]) -> None:
        self._tokens -= len(self._prefixes.pop(key).tokens)

    def _drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, prefix in self._prefixes.items() if prefix.expires_s <= now]:
            self._drop(key)

    def _make_room(self, tokens: int) -> None:
        if self._fits(tokens):
            return
        self._drop_expired()
        if not self._fits(tokens):
            raise PrefixesFull(
                f"{len(self._prefixes)} prefixes with {self._tokens} tokens are registered, of at "
                f"most {self._bounds.max_prefixes} and {self._bounds.max_tokens}; release some"
            )

    def _fits(self, tokens: int) -> bool:
        prefixes = len(self._prefixes) + 1
        total = self._tokens + tokens
        return prefixes <= self._bounds.max_prefixes and total <= self._bounds.max_tokens


def _content_id(tokens: Int32) -> str:
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=ID_BYTES).hexdigest()
