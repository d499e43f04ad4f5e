"""Nobody fills the server against the others."""

import numpy as np
import pytest

from stemserve.service.tenant_shares import TenantShares


def test_without_tenants_everything_is_whoever_s_comes() -> None:
    shares = TenantShares(3, {})
    assert shares.fits({"": 2}, "", 1)
    assert not shares.fits({"": 3}, "", 1)


def test_a_single_tenant_may_fill_the_server() -> None:
    shares = TenantShares(10, {"a": 2.0})
    assert shares.fits({"a": 9}, "a", 1)
    assert not shares.fits({"a": 10}, "a", 1)


def test_a_single_place_is_whoever_s_comes() -> None:
    shares = TenantShares(1, {"a": 1.0, "b": 1.0})
    assert shares.fits({}, "a", 1)
    assert not shares.fits({"a": 1}, "b", 1)


def test_a_greedy_tenant_leaves_the_others_their_part() -> None:
    shares = TenantShares(16, {"greedy": 1.0, "modest": 3.0})
    waiting = {"greedy": 0, "modest": 0}
    while shares.fits(waiting, "greedy", 1):
        waiting["greedy"] += 1
    assert waiting["greedy"] == 8 + 2  # what is common, and its quarter of the rest
    while shares.fits(waiting, "modest", 1):
        waiting["modest"] += 1
    assert waiting["modest"] == 6


@pytest.mark.parametrize("seed", range(10))
def test_what_waits_never_exceeds_the_limit_and_everyone_has_a_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = "abcd"
    weights = {name: float(rng.uniform(0.1, 5.0)) for name in names}
    shares = TenantShares(100, weights)
    waiting = dict.fromkeys(names, 0)
    for _ in range(1000):
        name, amount = names[int(rng.integers(4))], int(rng.integers(1, 9))
        fits = shares.fits(waiting, name, amount)
        part = int(50 * weights[name] / sum(weights.values()))
        assert fits or waiting[name] + amount > part
        if fits:
            waiting[name] += amount
        elif rng.random() < 0.3:
            waiting[name] = 0
        assert sum(waiting.values()) <= 100
