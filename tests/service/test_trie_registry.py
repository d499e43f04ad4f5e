"""Names of tries: whose they are, how long they live, and what they may take."""

import re

import numpy as np
import pytest

from stemserve.service.caller import Caller
from stemserve.service.calls.tries.trie_registry import (
    DEFAULT_TTL_S,
    NewTrie,
    TrieBounds,
    TrieRegistry,
)
from stemserve.service.constraints.token_trie import TokenTrie
from stemserve.service.constraints.trie_builder import TrieBuilder
from stemserve.service.errors import QuotaExceeded, TrieExists, TrieNotFound, TriesFull
from stemserve.service.packed_tokens import pack

BUILDER = TrieBuilder({9}, vocab_size=10, longest=99, max_ms=10_000)
A = Caller(tenant="a", salt=b"")
B = Caller(tenant="b", salt=b"")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def trie_of(*sequences: list[int]) -> TokenTrie:
    return BUILDER.build("set", pack([np.array(each, np.int32) for each in sequences]))


SEQUENCES = ([1, 2], [3])
TRIE = trie_of(*SEQUENCES)


def new(trie_id: str = "t", *, digest: str = "one", ttl_s: float = 0.0) -> NewTrie:
    return NewTrie(trie_id=trie_id, trie=trie_of(*SEQUENCES), digest=digest, ttl_s=ttl_s)


def make(clock: Clock, *, max_tries: int = 10, max_bytes: int = 1 << 20) -> TrieRegistry:
    return TrieRegistry(TrieBounds(max_tries=max_tries, max_bytes=max_bytes), clock=clock)


def test_a_trie_belongs_to_its_tenant() -> None:
    registry = make(Clock())
    registry.put(A, new())
    assert registry.get(A, "t").trie.num_bytes == TRIE.num_bytes
    for act in (registry.get, registry.use, registry.delete):
        with pytest.raises(TrieNotFound, match="UploadTrie first"):
            act(B, "t")
    registry.put(B, new(digest="other"))
    assert [kept.trie_id for kept in registry.page(A, after="", count=9)] == ["t"]
    registry.delete(A, "t")
    assert len(registry) == 1 and registry.num_bytes == TRIE.num_bytes


def test_a_deleted_trie_counts_until_the_last_generation_with_it_ends() -> None:
    clock = Clock()
    registry = make(clock, max_bytes=2 * TRIE.num_bytes)
    for trie_id in ("deleted", "expired"):
        registry.put(A, new(trie_id, ttl_s=5.0))
    generations = [registry.use(A, trie_id).trie for trie_id in ("deleted", "expired")]
    registry.delete(A, "deleted")
    clock.now += 6.0
    assert len(registry) == 0 and registry.num_bytes == 2 * TRIE.num_bytes
    with pytest.raises(TriesFull):
        registry.put(A, new("more"))
    del generations[0]
    registry.put(A, new("more"))
    generations.clear()
    assert registry.num_bytes == TRIE.num_bytes


def test_without_an_id_the_content_is_the_id() -> None:
    registry = make(Clock())
    assert registry.put(A, new("", digest="abc")).trie_id == "abc"
    assert registry.get(A, "abc").digest == "abc"


def test_each_use_lets_a_trie_live_on_and_the_longer_ttl_counts() -> None:
    clock = Clock()
    registry = make(clock)
    registry.put(A, new(ttl_s=10))
    registry.put(A, new("long"))
    clock.now += 9
    registry.use(A, "t")
    clock.now += 9
    assert registry.put(A, new(ttl_s=5)).ttl_s == 10
    registry.get(A, "t")
    clock.now += 10
    with pytest.raises(TrieNotFound):
        registry.get(A, "t")
    assert [kept.trie_id for kept in registry.page(A, after="", count=9)] == ["long"]
    clock.now += DEFAULT_TTL_S
    assert (len(registry), registry.num_bytes) == (0, 0)


def test_an_id_keeps_its_content() -> None:
    registry = make(Clock())
    registry.put(A, new())
    with pytest.raises(TrieExists, match="another id"):
        registry.put(A, new(digest="two"))


def test_no_more_tries_than_there_may_be_and_none_is_thrown_out() -> None:
    clock = Clock()
    registry = make(clock, max_tries=2)
    registry.put(A, new("1", ttl_s=5))
    registry.put(B, new("2"))
    with pytest.raises(TriesFull, match=r"2 are the most .* 1 of them are yours"):
        registry.put(A, new("3"))
    registry.put(A, new("1", ttl_s=5))
    clock.now += 5
    registry.put(A, new("3"))


def test_uploads_and_tries_share_the_bytes_of_all_and_of_a_tenant() -> None:
    registry = make(Clock(), max_bytes=3 * TRIE.num_bytes)
    limited = Caller(tenant="a", salt=b"", max_trie_bytes=2 * TRIE.num_bytes)
    registry.put(limited, new("1"))
    with registry.uploading(limited) as reserve:
        reserve(TRIE.num_bytes)
        with pytest.raises(QuotaExceeded) as refused:
            reserve(1)
        assert refused.value.subject == "max_trie_bytes"
        with registry.uploading(B) as reserve_of_b:
            reserve_of_b(TRIE.num_bytes)
            with pytest.raises(TriesFull, match="max_trie_bytes") as full:
                reserve_of_b(1)
            told = {int(number) for number in re.findall(r"\d+", str(full.value))}
            assert told == {1, TRIE.num_bytes, 3 * TRIE.num_bytes}  # nothing of what A holds
        registry.put(B, new("2"))
        with pytest.raises(QuotaExceeded):
            registry.put(limited, new("2"))
    registry.put(limited, new("2"))
    assert registry.num_bytes == 3 * TRIE.num_bytes
