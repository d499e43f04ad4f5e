"""Names for token sequences that many requests continue, each with its lifetime."""

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from stemserve.service.caller import Caller
from stemserve.service.errors import (
    NotPrefixOwner,
    PrefixesFull,
    PrefixExists,
    PrefixNotFound,
    QuotaExceeded,
)
from stemserve.service.request import NO_TRUNK, Int32, Realm, Trunk

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
    trunk: Trunk = NO_TRUNK  # of the parent
    ttl_s: float = 0.0  # 0: the default
    warm: bool = False
    pin: bool = False
    shared: bool = False  # with the owner's sharing group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegisteredPrefix:
    prefix_id: str
    parent_id: str  # empty for none
    space: str  # in which its id is unique: a tenant's, or a sharing group's
    owner: Caller  # who registered it first
    tokens: Int32  # with all parents
    trunk: Trunk  # all its tokens where it is shared, else its parent's
    ttl_s: float  # sliding; 0: no expiry
    expires_s: float  # on the registry's clock; infinite without expiry
    owners: Mapping[str, int]  # registrations of each tenant that were not released
    shared: bool = False
    warms: int = 0  # registrations that asked for it to be computed, and did not fail
    pins: int = 0  # and for it to be kept in the cache

    @property
    def warm(self) -> bool:
        """It is computed again for a new worker."""
        return self.warms > 0

    @property
    def pin(self) -> bool:
        """It is kept in the cache."""
        return self.pins > 0

    @property
    def pin_key(self) -> str:
        return f"{self.space}/{self.prefix_id}"

    def realm(self, caller: Caller) -> Realm:
        """Where its pages belong for a caller: the full ones of the trunk to the group."""
        return Realm(salt=caller.salt, trunk=self.trunk)


class PrefixRegistry:
    """Ids are unique under a tenant, and say nothing to another.

    Shared prefixes have the ids of their sharing group: its tenants see them behind their own, and
    whoever registers the same content is one of their owners. A prefix holds its parents' tokens,
    so releasing a parent leaves its children as they are. Registering the same content again under
    the same id adds an owner; the id is gone when the last owner released it, or when nobody used
    it for its TTL.
    """

    def __init__(self, bounds: RegistryBounds, *, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._clock = clock
        self._prefixes: dict[tuple[str, str], RegisteredPrefix] = {}
        self._tokens = 0
        self._dropped: deque[RegisteredPrefix] = deque()  # that were pinned

    def register(
        self, owner: Caller, new: NewPrefix, *, most_tokens: int | None = None
    ) -> RegisteredPrefix:
        """Without an id, the content's own: the same content then always has the same id.

        `most_tokens` bounds all prefixes of the owner, parents counted in each child. Raises
        PrefixExists, PrefixesFull or QuotaExceeded.
        """
        ttl_s = new.ttl_s or self._bounds.default_ttl_s
        tenant, tokens = owner.tenant, new.tokens
        space = _group_space(owner) if new.shared else tenant
        key = (space, new.prefix_id or _content_id(tokens, shared=new.shared))
        if new.shared and self._live((tenant, key[1])) is not None:
            raise PrefixExists(key[1])  # it would hide the shared one
        known = self._live(key)
        if known is not None and not np.array_equal(known.tokens, tokens):
            raise PrefixExists(key[1])
        if known is None or tenant not in known.owners:
            self._check_quota(tenant, len(tokens), most_tokens)
        if known is None:
            self._make_room(len(tokens))
            self._tokens += len(tokens)
            known = RegisteredPrefix(
                prefix_id=key[1],
                parent_id=new.parent_id,
                space=space,
                owner=owner,
                tokens=tokens,
                trunk=Trunk(salt=owner.group_salt, tokens=len(tokens)) if new.shared else new.trunk,
                ttl_s=ttl_s,
                expires_s=0.0,
                owners={},
                shared=new.shared,
            )
        longest = 0.0 if not known.ttl_s or not ttl_s else max(known.ttl_s, ttl_s)
        joined = replace(
            known,
            owners={**known.owners, tenant: known.owners.get(tenant, 0) + 1},
            ttl_s=longest,
            warms=known.warms + (new.warm or new.pin),
            pins=known.pins + new.pin,
        )
        return self._keep(key, joined)

    def get(self, caller: Caller, prefix_id: str) -> RegisteredPrefix:
        for space in _spaces(caller):
            if (known := self._live((space, prefix_id))) is not None:
                return known
        raise PrefixNotFound(prefix_id)

    def use(self, caller: Caller, prefix_id: str) -> RegisteredPrefix:
        """Get, and start the TTL anew."""
        known = self.get(caller, prefix_id)
        return self._keep((known.space, prefix_id), known)

    def renew(self, caller: Caller, prefix_id: str, *, ttl_s: float) -> RegisteredPrefix:
        """0 keeps the TTL as it is."""
        known = self._owned(caller, prefix_id)
        return self._keep((known.space, prefix_id), replace(known, ttl_s=ttl_s or known.ttl_s))

    def release(self, caller: Caller, prefix_id: str) -> None:
        known = self._owned(caller, prefix_id)
        owners = {**known.owners, caller.tenant: known.owners[caller.tenant] - 1}
        owners = {tenant: count for tenant, count in owners.items() if count}
        if owners:
            self._prefixes[known.space, prefix_id] = replace(known, owners=owners)
        else:
            self._drop((known.space, prefix_id))

    def withdraw(self, caller: Caller, prefix_id: str, asked: NewPrefix) -> None:
        """Release after a registration that failed: what it asked for is not asked for either."""
        self.release(caller, prefix_id)
        known = self._live((_group_space(caller) if asked.shared else caller.tenant, prefix_id))
        if known is None:
            return
        left = replace(
            known,
            warms=max(0, known.warms - (asked.warm or asked.pin)),
            pins=max(0, known.pins - asked.pin),
        )
        self._prefixes[known.space, prefix_id] = left
        if known.pin and not left.pin:
            self._dropped.append(known)

    def page(self, caller: Caller, *, after: str, count: int) -> tuple[RegisteredPrefix, ...]:
        """The next prefixes by id that the caller sees."""
        self._drop_expired()
        seen: dict[str, RegisteredPrefix] = {}
        for own in reversed(_spaces(caller)):
            seen |= {name: kept for (space, name), kept in self._prefixes.items() if space == own}
        ids = sorted(seen)
        start = bisect_right(ids, after)
        return tuple(seen[prefix_id] for prefix_id in ids[start : start + count])

    def to_keep_warm(self) -> tuple[RegisteredPrefix, ...]:
        """Those that somebody wants computed, of all clients."""
        self._drop_expired()
        return tuple(prefix for prefix in self._prefixes.values() if prefix.warm)

    def wants_pin(self, prefix: RegisteredPrefix) -> bool:
        """Whether it is still there, and to be pinned."""
        known = self._live((prefix.space, prefix.prefix_id))
        return known is not None and known.pin and np.array_equal(known.tokens, prefix.tokens)

    def next_dropped(self) -> RegisteredPrefix | None:
        """A pinned prefix that was released or has expired, and was not pinned again: that replaced
        its pin. Each is told once, but for those that are dropped again."""
        if not self._dropped:
            self._drop_expired()
        while self._dropped:
            gone = self._dropped.popleft()
            known = self._prefixes.get((gone.space, gone.prefix_id))
            if known is None or not known.pin:
                return gone
        return None

    def drop_again(self, prefix: RegisteredPrefix) -> None:
        """It may still be pinned."""
        self._dropped.append(prefix)

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._prefixes)

    def _owned(self, caller: Caller, prefix_id: str) -> RegisteredPrefix:
        known = self.get(caller, prefix_id)
        if caller.tenant not in known.owners:
            raise NotPrefixOwner(prefix_id)
        return known

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
        held = sum(len(p.tokens) for p in self._prefixes.values() if tenant in p.owners)
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


def _content_id(tokens: Int32, *, shared: bool) -> str:
    content = tokens.astype("<i4").tobytes()
    kind = b"shared" if shared else b""
    return hashlib.blake2b(content, digest_size=ID_BYTES, person=kind).hexdigest()


def _spaces(caller: Caller) -> tuple[str, ...]:
    """Where a caller's ids are looked up, in order."""
    return (caller.tenant, _group_space(caller)) if caller.group else (caller.tenant,)


def _group_space(caller: Caller) -> str:
    return f"group:{caller.group}"  # no tenant is called so
