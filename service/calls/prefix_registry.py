"""Names for token sequences that many requests continue, each with its lifetime."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from stemserve.service.caller import Caller
from stemserve.service.errors import PrefixesFull, PrefixExists, PrefixNotFound, QuotaExceeded
from stemserve.service.request import Int32

ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryBounds:
    max_prefixes: int = 10_000
    max_tokens: int = 16 << 20  # of all prefixes together, parents counted in each child
    default_ttl_s: float = 3_600.0  # 0: no expiry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewPrefix:
    """What a client asks to register."""

    prefix_id: str  # empty: the server makes one
    parent_id: str
    tokens: Int32  # with all parents
    ttl_s: float = 0.0  # 0: the default
    warm: bool = False
    pin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegisteredPrefix:
    prefix_id: str
    parent_id: str  # empty for none
    owner: Caller
    tokens: Int32  # with all parents
    ttl_s: float  # sliding; 0: no expiry
    expires_s: float  # on the registry's clock; infinite without expiry
    owners: int = 1  # registrations that were not released
    warm: bool = False  # to be computed again for a new worker
    pin: bool = False  # and kept in the cache

    @property
    def pin_key(self) -> str:
        return f"{self.owner.tenant}/{self.prefix_id}"


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
        self._dropped: list[RegisteredPrefix] = []

    def register(
        self, owner: Caller, new: NewPrefix, *, most_tokens: int | None = None
    ) -> RegisteredPrefix:
        """Without an id, the content's own: the same content then always has the same id.

        `most_tokens` bounds all prefixes of the owner, parents counted in each child. Raises
        PrefixExists, PrefixesFull or QuotaExceeded.
        """
        ttl_s = new.ttl_s or self._bounds.default_ttl_s
        tokens = new.tokens
        key = (owner.tenant, new.prefix_id or _content_id(tokens))
        known = self._live(key)
        if known is None:
            self._check_quota(owner.tenant, len(tokens), most_tokens)
            self._make_room(len(tokens))
            self._tokens += len(tokens)
            known = RegisteredPrefix(
                prefix_id=key[1],
                parent_id=new.parent_id,
                owner=owner,
                tokens=tokens,
                ttl_s=ttl_s,
                expires_s=0.0,
                owners=0,
            )
        elif not np.array_equal(known.tokens, tokens):
            raise PrefixExists(key[1])
        longest = 0.0 if not known.ttl_s or not ttl_s else max(known.ttl_s, ttl_s)
        joined = replace(
            known,
            owners=known.owners + 1,
            ttl_s=longest,
            warm=known.warm or new.warm or new.pin,
            pin=known.pin or new.pin,
        )
        return self._keep(key, joined)

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

    def to_keep_warm(self) -> tuple[RegisteredPrefix, ...]:
        """Those that somebody wants computed, of all clients."""
        self._drop_expired()
        return tuple(prefix for prefix in self._prefixes.values() if prefix.warm)

    def take_dropped(self) -> tuple[RegisteredPrefix, ...]:
        """Pinned prefixes that were released or have expired since the last call, and were not
        pinned again: that replaced their pin."""
        self._drop_expired()
        dropped, self._dropped = self._dropped, []
        pinned = {prefix.pin_key for prefix in self._prefixes.values() if prefix.pin}
        return tuple(prefix for prefix in dropped if prefix.pin_key not in pinned)

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
        gone = self._prefixes.pop(key)
        self._tokens -= len(gone.tokens)
        if gone.pin:
            self._dropped.append(gone)

    def _drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, prefix in self._prefixes.items() if prefix.expires_s <= now]:
            self._drop(key)

    def _check_quota(self, tenant: str, tokens: int, most_tokens: int | None) -> None:
        if most_tokens is None:
            return
        self._drop_expired()
        held = sum(len(p.tokens) for (owner, _), p in self._prefixes.items() if owner == tenant)
        if held + tokens > most_tokens:
            raise QuotaExceeded(
                f"the registered prefixes of tenant {tenant} would have {held + tokens} tokens, "
                f"at most {most_tokens} are allowed; release some",
                subject="max_prefix_bytes",
                retry_after_s=0.0,
            )

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
