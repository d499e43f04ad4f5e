"""The index of the cache, against plain comparison of token lists."""

import numpy as np
import pytest

from stemserve.service.batching.pages.page_allocator import PageAllocator
from stemserve.service.batching.pages.page_node import PageNode, child, common_tokens, token_key
from stemserve.service.batching.pages.prefix_tree import PrefixTree
from stemserve.service.request import Int32, Realm, Trunk

PAGE = 4
HERE = Realm()


def tokens_of(*values: int) -> Int32:
    return np.array(values, np.int32)


class Cache:
    """A tree, and how sequences get into it."""

    def __init__(self, pages: int) -> None:
        self.allocator = PageAllocator(pages)
        self.tree = PrefixTree(self.allocator, PAGE)

    def hold(self, tokens: Int32, realm: Realm = HERE) -> list[PageNode]:
        """Adds what is missing, as computed."""
        key = token_key(tokens)
        nodes, tail, shared = self.tree.match(key, realm)
        if tail is not None and len(nodes) * PAGE + shared == len(tokens) == 0:
            nodes.append(tail)
        self.tree.retain(nodes)
        while len(nodes) * PAGE < len(tokens):
            part = key[len(nodes) * PAGE * 4 : (len(nodes) + 1) * PAGE * 4]
            parent = self.tree.parent(nodes, realm)
            known = child(parent, part)
            if known is not None:
                self.tree.retain([known])
                nodes.append(known)
                continue
            node = self.tree.insert(parent, part, int(self.allocator.allocate(1)[0]))
            node.planned = node.size
            nodes.append(node)
        return nodes

    def matched(self, tokens: Int32, realm: Realm = HERE) -> int:
        nodes, _, shared = self.tree.match(token_key(tokens), realm)
        return len(nodes) * PAGE + shared


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_that_of_comparing_all_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(500)
    known: list[Int32] = []
    for _ in range(30):
        tokens = rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32)
        longest = max((common_tokens(token_key(k), token_key(tokens)) for k in known), default=0)
        assert cache.matched(tokens) == longest
        cache.hold(tokens)
        known.append(tokens)


def test_ids_that_share_bytes_are_told_apart() -> None:
    cache = Cache(8)
    cache.hold(tokens_of(1, 256, 65536, 2))
    assert cache.matched(tokens_of(256, 1, 65536, 2)) == 0
    assert cache.matched(tokens_of(1, 256, 65537, 2)) == 2


def test_a_salt_sees_its_own_pages_only() -> None:
    cache = Cache(8)
    cache.hold(tokens_of(1, 2, 3, 4, 5), Realm(salt=b"a"))
    assert cache.matched(tokens_of(1, 2, 3, 4, 5), Realm(salt=b"a")) == 5
    assert cache.matched(tokens_of(1, 2, 3, 4, 5), Realm(salt=b"b")) == 0
    assert cache.matched(tokens_of(1, 2, 3, 4, 5), HERE) == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = Cache(6)
    old, new = tokens_of(1, 1, 1, 1, 2), tokens_of(3, 3, 3, 3, 4)
    held = [cache.hold(old), cache.hold(new)]
    for nodes in held:
        cache.tree.release(nodes)
    again = cache.hold(old)
    cache.tree.release(again)
    cache.tree.evict(1)
    assert (cache.matched(old), cache.matched(new)) == (5, 4)
    cache.tree.evict(1)
    assert (cache.matched(old), cache.matched(new)) == (5, 0)
    cache.tree.evict(2)
    assert cache.allocator.num_free == 6 and cache.tree.num_pages == 0


@pytest.mark.parametrize("seed", range(10))
def test_eviction_never_takes_what_is_held(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(30)
    held: list[tuple[Int32, list[PageNode]]] = []
    for _ in range(400):
        tokens = rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32)
        missing = -(-len(tokens) // PAGE) - cache.matched(tokens) // PAGE
        if rng.random() < 0.5 and missing <= cache.allocator.num_free:
            held.append((tokens, cache.hold(tokens)))
        elif held and rng.random() < 0.6:
            _, nodes = held.pop(int(rng.integers(len(held))))
            cache.tree.release(nodes)
        elif cache.tree.num_unreferenced:
            cache.tree.evict(int(rng.integers(1, cache.tree.num_unreferenced + 1)))
        for tokens, nodes in held:
            assert cache.matched(tokens) == len(tokens)
            assert all(node.attached and not cache.allocator.is_free(node.page) for node in nodes)
        in_use = {node.page for _, nodes in held for node in nodes}
        assert cache.tree.num_pages - cache.tree.num_unreferenced == len(in_use)
        assert cache.allocator.num_free + cache.tree.num_pages == 30


@pytest.mark.parametrize("seed", range(10))
def test_pages_evicted_together_are_those_that_would_go_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    together, one_by_one = Cache(400), Cache(400)
    held: list[tuple[list[PageNode], list[PageNode]]] = []
    for _ in range(60):
        tokens = rng.integers(0, 2, rng.integers(1, 40)).astype(np.int32)
        realm = Realm(salt=b"a", trunk=Trunk(salt=b"g", tokens=8)) if rng.random() < 0.3 else HERE
        held.append((together.hold(tokens, realm), one_by_one.hold(tokens, realm)))
        if rng.random() < 0.7:
            nodes, same = held.pop(int(rng.integers(len(held))))
            together.tree.release(nodes)
            one_by_one.tree.release(same)
        count = int(rng.integers(0, together.tree.num_unreferenced // 3 + 1))
        together.tree.evict(count)
        for _ in range(count):
            one_by_one.tree.evict(1)
        assert _pages(together) == _pages(one_by_one)
        assert together.allocator.num_free == one_by_one.allocator.num_free
        assert together.tree.num_unreferenced == one_by_one.tree.num_unreferenced


def _pages(cache: Cache) -> set[tuple[int, bytes]]:
    nodes = cache.tree.nodes()
    assert len(nodes) == cache.tree.num_pages
    return {(node.page, node.key) for node in nodes}


def test_a_page_without_content_is_not_kept() -> None:
    cache = Cache(4)
    nodes = cache.hold(tokens_of(1, 2, 3, 4, 5, 6))
    nodes[1].planned = 0
    cache.tree.release(nodes)
    assert cache.matched(tokens_of(1, 2, 3, 4, 5, 6)) == 4
    assert cache.allocator.num_free == 3


def test_a_discarded_page_is_lost_with_all_behind_it_and_freed_when_let_go() -> None:
    cache = Cache(6)
    tokens = tokens_of(1, 2, 3, 4, 5, 6, 7, 8, 9)
    held = cache.hold(tokens)
    sibling = cache.hold(tokens_of(1, 2, 3, 4, 0))
    cache.tree.release(sibling)
    cache.tree.discard(held[1])
    assert cache.matched(tokens) == 4
    assert cache.matched(tokens_of(1, 2, 3, 4, 0)) == 5
    assert cache.allocator.num_free == 2
    cache.tree.release(held)
    assert cache.allocator.num_free == 4 and cache.tree.num_unreferenced == 2


def test_a_leaf_that_is_filled_further_is_found_by_its_new_tokens() -> None:
    cache = Cache(4)
    nodes = cache.hold(tokens_of(1, 2))
    cache.hold(tokens_of(1, 2, 7))
    cache.tree.extend_key(nodes[0], token_key(tokens_of(1, 2, 3, 4)))
    assert cache.tree.match(token_key(tokens_of(1, 2, 3, 4)), HERE).nodes == nodes


def test_the_list_of_eviction_candidates_stays_small() -> None:
    cache = Cache(4)
    tokens = tokens_of(1, 2, 3)
    for _ in range(1000):
        cache.tree.release(cache.hold(tokens))
    assert len(cache.tree._evictable) < 100  # pyright: ignore[reportPrivateUsage]
    cache.tree.evict(1)
    assert cache.allocator.num_free == 4


def behind_trunk(salt: bytes, tokens: int) -> Realm:
    return Realm(salt=salt, trunk=Trunk(salt=b"group", tokens=tokens))


def test_a_trunk_is_shared_to_its_last_full_page_and_what_follows_is_not() -> None:
    cache = Cache(20)
    tokens = tokens_of(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
    cache.hold(tokens, behind_trunk(b"a", 10))
    assert cache.matched(tokens, behind_trunk(b"a", 10)) == 13
    assert cache.matched(tokens, behind_trunk(b"b", 10)) == 8
    assert cache.matched(tokens, behind_trunk(b"b", 13)) == 8
    assert cache.matched(tokens, behind_trunk(b"a", 7)) == 4
    assert cache.matched(tokens, Realm(salt=b"a")) == 0
    assert cache.matched(tokens, Realm(salt=b"group")) == 8


@pytest.mark.parametrize("trunk", [0, 3])
def test_a_trunk_without_a_full_page_shares_nothing(trunk: int) -> None:
    cache = Cache(20)
    cache.hold(tokens_of(1, 2, 3, 4, 5), behind_trunk(b"a", trunk))
    assert cache.matched(tokens_of(1, 2, 3, 4, 5), behind_trunk(b"b", trunk)) == 0
    assert cache.matched(tokens_of(1, 2, 3, 4, 5), Realm(salt=b"a")) == 5


def test_a_trunk_stays_while_a_tenant_has_pages_behind_it() -> None:
    cache = Cache(8)
    trunk, tokens = tokens_of(1, 2, 3, 4), tokens_of(1, 2, 3, 4, 5)
    for salt in (b"a", b"b"):
        cache.tree.release(cache.hold(tokens, behind_trunk(salt, 4)))
    cache.tree.evict(1)
    assert cache.matched(trunk, behind_trunk(b"c", 4)) == 4
    assert cache.matched(tokens, behind_trunk(b"a", 4)) == 4
    assert cache.matched(tokens, behind_trunk(b"b", 4)) == 5
    cache.tree.evict(2)
    assert cache.matched(trunk, behind_trunk(b"c", 4)) == 0
    assert cache.allocator.num_free == 8 and cache.tree.num_pages == 0


def test_a_discarded_trunk_takes_the_pages_of_all_tenants_along() -> None:
    cache = Cache(8)
    tokens = tokens_of(1, 2, 3, 4, 5, 6, 7, 8, 9)
    held = cache.hold(tokens, behind_trunk(b"a", 8))
    cache.tree.release(cache.hold(tokens, behind_trunk(b"b", 8)))
    cache.tree.discard(held[1])
    assert cache.tree.num_pages == 1 and cache.allocator.num_free == 5
    assert cache.matched(tokens, behind_trunk(b"b", 8)) == 4
    again = cache.hold(tokens, behind_trunk(b"b", 8))
    cache.tree.release(held)
    cache.tree.release(again)
    assert cache.tree.num_unreferenced == cache.tree.num_pages == 3
    cache.tree.evict(3)
    assert cache.allocator.num_free == 8
