"""Names for sets of token sequences, each with its lifetime and its memory."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import ref

from stemserve.service.caller import Caller
from stemserve.service.constraints.token_trie import TokenTrie
from stemserve.service.errors import QuotaExceeded, TrieExists, TrieNotFound, TriesFull

DEFAULT_TTL_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrieBounds:
    max_tries: int
    max_bytes: int  # of all tries, and of uploads that are read


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewTrie:
    trie_id: str  # empty: made of the content
    trie: TokenTrie
    digest: str  # of the content
    ttl_s: float  # 0: the default


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegisteredTrie:
    trie_id: str
    trie: TokenTrie
    digest: str
    ttl_s: float  # sliding
    expires_s: float  # on the registry's clock


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gone:
    tenant: str
    trie: ref[TokenTrie]
    num_bytes: int


class TrieRegistry:
    """Ids are unique under a tenant, and say nothing to another.

    A trie is gone when it is deleted, or was not used for its TTL; nothing else makes room. Its
    bytes count until the generations that still use it have ended.
    """

    def __init__(self, bounds: TrieBounds, *, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._clock = clock
        self._tries: dict[tuple[str, str], RegisteredTrie] = {}
        self._bytes: Counter[str] = Counter()  # by tenant, uploads too
        self._gone: list[_Gone] = []  # what generations may still use

    @property
    def num_bytes(self) -> int:
        self._settle()
        return self._bytes.total()

    def __len__(self) -> int:
        self.drop_expired()
        return len(self._tries)

    @contextmanager
    def uploading(self, caller: Caller) -> Generator[Callable[[int], None]]:
        """Takes numbers of bytes that wait to become a trie; they count until the end. It raises
        TriesFull or QuotaExceeded."""
        taken = 0

        def reserve(count: int) -> None:
            nonlocal taken
            self._reserve(caller, count)
            taken += count

        try:
            yield reserve
        finally:
            self._bytes[caller.tenant] -= taken

    def put(self, caller: Caller, new: NewTrie) -> RegisteredTrie:
        """The same content again under its id lives as long as either asks. Raises TrieExists,
        TriesFull or QuotaExceeded."""
        key = (caller.tenant, new.trie_id or new.digest)
        ttl_s = new.ttl_s or DEFAULT_TTL_S
        known = self._live(key)
        if known is not None:
            if known.digest != new.digest:
                raise TrieExists(key[1])
            return self._keep(key, replace(known, ttl_s=max(known.ttl_s, ttl_s)))
        if len(self) >= self._bounds.max_tries:
            raise TriesFull(
                f"there is no room for another trie: {self._bounds.max_tries} are the most of all "
                f"callers (max_tries), {self._count(caller)} of them are yours; delete some"
            )
        self._reserve(caller, new.trie.num_bytes)
        made = RegisteredTrie(
            trie_id=key[1], trie=new.trie, digest=new.digest, ttl_s=ttl_s, expires_s=0.0
        )
        return self._keep(key, made)

    def get(self, caller: Caller, trie_id: str) -> RegisteredTrie:
        """Raises TrieNotFound."""
        known = self._live((caller.tenant, trie_id))
        if known is None:
            raise TrieNotFound(trie_id)
        return known

    def use(self, caller: Caller, trie_id: str) -> RegisteredTrie:
        """Get, and start the TTL anew."""
        return self._keep((caller.tenant, trie_id), self.get(caller, trie_id))

    def delete(self, caller: Caller, trie_id: str) -> None:
        """Raises TrieNotFound."""
        self.get(caller, trie_id)
        self._drop((caller.tenant, trie_id))

    def page(self, caller: Caller, *, after: str, count: int) -> tuple[RegisteredTrie, ...]:
        """The caller's next tries by id."""
        self.drop_expired()
        ids = sorted(name for tenant, name in self._tries if tenant == caller.tenant)
        start = bisect_right(ids, after)
        return tuple(self._tries[caller.tenant, name] for name in ids[start : start + count])

    def drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, trie in self._tries.items() if trie.expires_s <= now]:
            self._drop(key)

    def _count(self, caller: Caller) -> int:
        return sum(tenant == caller.tenant for tenant, _ in self._tries)

    def _keep(self, key: tuple[str, str], trie: RegisteredTrie) -> RegisteredTrie:
        kept = self._tries[key] = replace(trie, expires_s=self._clock() + trie.ttl_s)
        return kept

    def _live(self, key: tuple[str, str]) -> RegisteredTrie | None:
        known = self._tries.get(key)
        if known is not None and known.expires_s <= self._clock():
            self._drop(key)
            return None
        return known

    def _drop(self, key: tuple[str, str]) -> None:
        trie = self._tries.pop(key).trie
        self._gone.append(_Gone(tenant=key[0], trie=ref(trie), num_bytes=trie.num_bytes))

    def _settle(self) -> None:
        """Give back the bytes of what nobody uses."""
        self.drop_expired()
        for gone in self._gone:
            if gone.trie() is None:
                self._bytes[gone.tenant] -= gone.num_bytes
        self._gone = [gone for gone in self._gone if gone.trie() is not None]

    def _reserve(self, caller: Caller, count: int) -> None:
        most, tenant = caller.max_trie_bytes, caller.tenant
        if most and self._bytes[tenant] + count > most:
            self._settle()
            held = self._bytes[tenant] + count
            if held > most:
                raise QuotaExceeded(
                    f"the tries of tenant {tenant} would take {held} bytes with this upload, at "
                    f"most {most} are allowed; delete some",
                    subject="max_trie_bytes",
                    retry_after_s=0.0,
                )
        room = self._bounds.max_bytes - count
        if self._bytes.total() > room and self.num_bytes > room:
            raise TriesFull(
                f"there is no room for {count} bytes more: {self._bounds.max_bytes} are the most "
                f"of all callers (max_trie_bytes), {self._bytes[tenant]} of them are yours; "
                "delete some"
            )
        self._bytes[tenant] += count
