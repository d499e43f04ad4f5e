"""Registered prefixes: owners, lifetimes and bounds, with a clock that the test moves."""

import numpy as np
import pytest

from stemserve.service.caller import Caller
from stemserve.service.calls.prefixes.prefix_registry import (
    NewPrefix,
    PrefixRegistry,
    RegisteredPrefix,
    RegistryBounds,
)
from stemserve.service.errors import (
    NotPrefixOwner,
    PrefixesFull,
    PrefixExists,
    PrefixNotFound,
    QuotaExceeded,
)
from stemserve.service.request import NO_TRUNK, Int32, Realm, Trunk


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def caller(tenant: str) -> Caller:
    group = "web" if tenant.startswith("web") else ""
    return Caller(tenant=tenant, salt=tenant.encode(), group=group, group_salt=group.encode())


def make(clock: Clock, bounds: RegistryBounds | None = None) -> PrefixRegistry:
    return PrefixRegistry(bounds or RegistryBounds(default_ttl_s=10.0), clock=clock)


def add(
    registry: PrefixRegistry,
    prefix_id: str,
    *tokens: int,
    owner: str = "",
    ttl_s: float = 0.0,
    warm: bool = False,
    pin: bool = False,
    shared: bool = False,
    trunk: Trunk = NO_TRUNK,
    most_tokens: int | None = None,
) -> RegisteredPrefix:
    new = NewPrefix(
        prefix_id=prefix_id,
        parent_id="",
        tokens=ids(*tokens),
        trunk=trunk,
        ttl_s=ttl_s,
        warm=warm,
        pin=pin,
        shared=shared,
    )
    return registry.register(caller(owner), new, most_tokens=most_tokens)


def dropped(registry: PrefixRegistry) -> list[str]:
    return [prefix.prefix_id for prefix in iter(registry.next_dropped, None)]


def test_the_same_content_gets_the_same_id() -> None:
    registry = make(Clock())
    assert add(registry, "", 1, 2).prefix_id == add(registry, "", 1, 2).prefix_id
    assert add(registry, "", 1, 2).prefix_id != add(registry, "", 2, 1).prefix_id


def test_other_content_under_a_known_id_is_refused() -> None:
    registry = make(Clock())
    add(registry, "a", 1)
    with pytest.raises(PrefixExists, match="'a'"):
        add(registry, "a", 2)
    assert registry.get(caller(""), "a").tokens.tolist() == [1]


def test_b47_a_prefix_stays_until_its_last_owner_releases_it() -> None:
    registry = make(Clock())
    add(registry, "a", 1)
    add(registry, "a", 1)
    registry.release(caller(""), "a")
    assert registry.get(caller(""), "a").tokens.tolist() == [1]
    registry.release(caller(""), "a")
    with pytest.raises(PrefixNotFound):
        registry.get(caller(""), "a")


def test_b47_a_prefix_expires_when_it_was_not_used_for_its_ttl() -> None:
    clock = Clock()
    registry = make(clock)
    add(registry, "a", 1)
    clock.now += 9
    registry.use(caller(""), "a")
    clock.now += 9
    registry.get(caller(""), "a")
    clock.now += 1
    with pytest.raises(PrefixNotFound):
        registry.use(caller(""), "a")
    assert len(registry) == 0


def test_renew_changes_the_ttl_only_when_asked() -> None:
    registry = make(Clock())
    add(registry, "a", 1, ttl_s=5)
    assert registry.renew(caller(""), "a", ttl_s=0).ttl_s == 5
    assert registry.renew(caller(""), "a", ttl_s=7).expires_s == 107


def test_registering_again_keeps_the_longer_ttl() -> None:
    registry = make(Clock())
    add(registry, "a", 1, ttl_s=50)
    assert add(registry, "a", 1, ttl_s=5).ttl_s == 50


def test_without_a_default_ttl_a_prefix_never_expires() -> None:
    clock = Clock()
    registry = make(clock, RegistryBounds(default_ttl_s=0))
    add(registry, "a", 1)
    clock.now += 1e9
    assert registry.get(caller(""), "a").prefix_id == "a"


def test_an_owner_sees_no_id_of_another() -> None:
    registry = make(Clock())
    add(registry, "a", 1, owner="x")
    with pytest.raises(PrefixNotFound):
        registry.get(caller("y"), "a")
    assert registry.page(caller("y"), after="", count=10) == ()


def test_pages_follow_each_other_by_id() -> None:
    registry = make(Clock())
    for name in "dbeac":
        add(registry, name, 1)
    first = registry.page(caller(""), after="", count=2)
    second = registry.page(caller(""), after="b", count=2)
    assert [prefix.prefix_id for prefix in (*first, *second)] == ["a", "b", "c", "d"]


def test_b47_a_full_registry_refuses_until_something_expires() -> None:
    clock = Clock()
    registry = make(clock, RegistryBounds(max_tokens=3, default_ttl_s=10))
    add(registry, "a", 1, 2)
    with pytest.raises(PrefixesFull, match="release some"):
        add(registry, "b", 1, 2)
    clock.now += 10
    assert add(registry, "b", 1, 2).prefix_id == "b"


def test_an_owner_is_held_to_its_quota_and_others_are_not() -> None:
    clock = Clock()
    registry = make(clock)
    add(registry, "a", 1, 2, owner="x", most_tokens=3)
    with pytest.raises(QuotaExceeded, match="would have 4 tokens, at most 3"):
        add(registry, "b", 1, 2, owner="x", most_tokens=3)
    add(registry, "a", 1, 2, owner="x", most_tokens=3)
    add(registry, "b", 1, 2, owner="y", most_tokens=3)
    clock.now += 10
    add(registry, "b", 1, 2, owner="x", most_tokens=3)


def test_dropped_pins_are_told_once() -> None:
    clock = Clock()
    registry = make(clock)
    add(registry, "released", 1, pin=True)
    add(registry, "expired", 2, pin=True)
    add(registry, "plain", 3)
    registry.release(caller(""), "released")
    registry.release(caller(""), "plain")
    assert dropped(registry) == ["released"]
    clock.now += 10
    assert dropped(registry) == ["expired"]
    assert dropped(registry) == []


def test_a_prefix_that_is_pinned_again_keeps_its_new_pin() -> None:
    clock = Clock()
    registry = make(clock)
    add(registry, "again", 1, pin=True)
    add(registry, "unpinned", 2, pin=True)
    clock.now += 10
    add(registry, "again", 1, pin=True)
    add(registry, "unpinned", 2)
    assert dropped(registry) == ["unpinned"]


def test_a_dropped_prefix_may_be_dropped_again_unless_it_is_pinned_again() -> None:
    registry = make(Clock())
    for prefix_id in ("a", "b"):
        add(registry, prefix_id, 1, pin=True)
        registry.release(caller(""), prefix_id)
    first = registry.next_dropped()
    assert first is not None and first.prefix_id == "a"
    registry.drop_again(first)
    assert dropped(registry) == ["b", "a"]
    registry.drop_again(first)
    add(registry, "a", 1, pin=True)
    assert dropped(registry) == []


def test_what_one_owner_wants_warm_or_pinned_stays_so_for_all() -> None:
    registry = make(Clock())
    add(registry, "a", 1, pin=True)
    assert add(registry, "a", 1).pin
    add(registry, "b", 2)
    assert not registry.get(caller(""), "b").warm
    add(registry, "b", 2, warm=True)
    assert {prefix.prefix_id for prefix in registry.to_keep_warm()} == {"a", "b"}


def test_a_registration_that_failed_takes_its_pin_with_it() -> None:
    registry = make(Clock())
    add(registry, "a", 1)
    pinned = NewPrefix(prefix_id="a", parent_id="", tokens=ids(1), pin=True)
    registry.register(caller(""), pinned)
    registry.withdraw(caller(""), "a", pinned)
    found = registry.get(caller(""), "a")
    assert not found.pin and not found.warm and found.owners == {"": 1}
    assert dropped(registry) == ["a"]
    registry.register(caller(""), pinned)
    registry.register(caller(""), pinned)
    registry.withdraw(caller(""), "a", pinned)
    assert registry.get(caller(""), "a").pin
    assert dropped(registry) == []


def test_a_shared_prefix_belongs_to_the_group_and_a_child_to_its_tenant_behind_it() -> None:
    registry = make(Clock())
    law = add(registry, "law", 1, 2, owner="web1", shared=True)
    trunk = Trunk(salt=b"web", tokens=2)
    assert law.realm(caller("web2")) == Realm(salt=b"web2", trunk=trunk)
    case = add(registry, "case", 1, 2, 3, owner="web2", trunk=law.trunk)
    assert case.realm(caller("web2")) == Realm(salt=b"web2", trunk=trunk)
    assert registry.use(caller("web2"), "law").prefix_id == "law"
    with pytest.raises(PrefixNotFound):
        registry.get(caller("web1"), "case")
    with pytest.raises(PrefixNotFound):
        registry.get(caller("x"), "law")


def test_each_owner_of_a_shared_prefix_releases_what_it_registered() -> None:
    registry = make(Clock())
    for owner in ("web1", "web1", "web2"):
        add(registry, "law", 1, owner=owner, shared=True)
    registry.release(caller("web2"), "law")
    with pytest.raises(NotPrefixOwner):
        registry.release(caller("web2"), "law")
    registry.release(caller("web1"), "law")
    registry.release(caller("web1"), "law")
    with pytest.raises(PrefixNotFound):
        registry.get(caller("web1"), "law")


def test_a_shared_prefix_counts_in_the_quota_of_each_owner() -> None:
    registry = make(Clock())
    add(registry, "law", 1, 2, owner="web1", shared=True, most_tokens=3)
    add(registry, "own", 3, 4, owner="web2", most_tokens=3)
    with pytest.raises(QuotaExceeded):
        add(registry, "law", 1, 2, owner="web2", shared=True, most_tokens=3)
    with pytest.raises(QuotaExceeded):
        add(registry, "more", 1, 2, owner="web1", most_tokens=3)


def test_an_id_of_a_tenants_own_comes_before_one_of_its_group() -> None:
    registry = make(Clock())
    add(registry, "a", 1, owner="web1", shared=True)
    add(registry, "a", 2, owner="web2")
    assert registry.get(caller("web1"), "a").shared
    assert registry.get(caller("web2"), "a").tokens.tolist() == [2]
    page = registry.page(caller("web2"), after="", count=9)
    assert [(prefix.prefix_id, prefix.shared) for prefix in page] == [("a", False)]
    with pytest.raises(PrefixExists):
        add(registry, "a", 1, owner="web2", shared=True)
    with pytest.raises(PrefixExists):
        add(registry, "a", 3, owner="web3", shared=True)


def test_sharing_gives_the_same_content_another_id_and_pin() -> None:
    registry = make(Clock())
    own = add(registry, "", 1, 2, owner="web1")
    shared = add(registry, "", 1, 2, owner="web1", shared=True)
    assert own.prefix_id != shared.prefix_id and own.pin_key != shared.pin_key
