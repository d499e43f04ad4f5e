"""Pinned prefixes stay in the cache; nobody waits for ever because of them."""

import numpy as np
import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.literal_worker import PAGE
from tests.service.toy_jobs import generate_job, int32, label_job, random_tokens, run_right

from stemserve.service.errors import NeverFits, QuotaExceeded
from stemserve.service.request import Realm

PAGES = 20


def warmed(rig: Rig, seed: int, tokens: int) -> list[int]:
    context = random_tokens(seed, tokens)
    run_right(rig, label_job(f"warm{seed}", [context], [[1]], [0]))
    return context


def pin(rig: Rig, key: str, context: list[int]) -> int:
    return rig.batcher.pin(key, int32(context), Realm())


def resident(rig: Rig, context: list[int]) -> int:
    return rig.batcher.resident_tokens(int32(context), Realm())


@pytest.mark.parametrize("tokens", [PAGE, 3 * PAGE, 3 * PAGE + 1, PAGE - 1])
def test_b47_a_pinned_prefix_outlives_what_others_need(tokens: int) -> None:
    rig = make_rig(pages=PAGES)
    kept, lost = warmed(rig, 1, tokens), warmed(rig, 2, tokens)
    assert pin(rig, "kept", kept) == tokens
    for seed in range(10, 14):
        warmed(rig, seed, 12 * PAGE)
    assert resident(rig, kept) == tokens
    assert resident(rig, lost) == 0
    rig.batcher.check_idle()
    rig.batcher.unpin("kept")
    for seed in range(20, 24):
        warmed(rig, seed, 12 * PAGE)
    assert resident(rig, kept) == 0
    rig.batcher.check_idle()


@pytest.mark.parametrize("tokens", [1, PAGE - 1, 2 * PAGE + 1])
@pytest.mark.parametrize("more", [1, PAGE, 3 * PAGE])
def test_a_prefix_whose_last_page_holds_a_longer_text_can_be_pinned(tokens: int, more: int) -> None:
    rig = make_rig(pages=PAGES)
    longer = warmed(rig, 1, tokens + more)
    kept = longer[:tokens]
    assert pin(rig, "kept", kept) == tokens
    for seed in range(10, 14):
        warmed(rig, seed, 12 * PAGE)
    assert resident(rig, kept) == tokens
    rig.batcher.unpin("kept")
    rig.batcher.check_idle()


def test_only_what_is_computed_can_be_pinned() -> None:
    rig = make_rig(pages=PAGES)
    context = warmed(rig, 1, 2 * PAGE)
    assert pin(rig, "longer", [*context, *random_tokens(2, 5 * PAGE)]) == 2 * PAGE
    assert pin(rig, "other", random_tokens(3, 50)) == 0


def test_b47_half_of_the_pool_may_be_pinned_and_shared_pages_count_once() -> None:
    rig = make_rig(pages=PAGES)
    context = warmed(rig, 1, 10 * PAGE)
    pin(rig, "a", context)
    pin(rig, "b", context[: 4 * PAGE])
    more = warmed(rig, 2, PAGE)
    with pytest.raises(QuotaExceeded, match="at most half"):
        pin(rig, "c", more)
    rig.batcher.unpin("a")
    assert pin(rig, "c", more) == PAGE
    rig.batcher.check_idle()


def test_pinning_again_under_a_key_replaces_the_pin() -> None:
    rig = make_rig(pages=PAGES)
    context = warmed(rig, 1, 8 * PAGE)
    for _ in range(3):
        pin(rig, "a", context)
    rig.batcher.unpin("a")
    rig.batcher.unpin("a")
    for seed in range(10, 14):
        warmed(rig, seed, 12 * PAGE)
    assert resident(rig, context) == 0
    rig.batcher.check_idle()


def test_b45_a_job_that_pins_leave_no_room_for_is_refused_at_once() -> None:
    rig = make_rig(pages=PAGES)
    pin(rig, "a", warmed(rig, 1, 8 * PAGE))
    with pytest.raises(NeverFits, match="12 that are not pinned"):
        rig.submit(label_job("large", [random_tokens(2, 13 * PAGE)], [[1]], [0]))
    run_right(rig, label_job("fits", [random_tokens(2, 12 * PAGE)], [[1]], [0]))


def test_a_pin_that_would_starve_a_waiting_job_is_refused() -> None:
    rig = make_rig(pages=PAGES)
    context = warmed(rig, 1, 8 * PAGE)
    rig.submit(label_job("large", [random_tokens(2, 15 * PAGE)], [[1]], [0]))
    with pytest.raises(QuotaExceeded):
        pin(rig, "a", context)
    while rig.turn():
        pass
    assert rig.answers["large"].result is not None


@pytest.mark.parametrize("seed", range(4))
def test_pins_that_come_and_go_beside_work_leave_nothing_behind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rig = make_rig(pages=40)
    contexts = [random_tokens(int(n), int(rng.integers(1, 6 * PAGE))) for n in range(6)]
    for turn in range(40):
        context = contexts[int(rng.integers(len(contexts)))]
        run_right(rig, generate_job(f"{turn}", [*context, 1], max_new_tokens=3))
        key = str(rng.integers(4))
        if rng.random() < 0.5:
            pin(rig, key, context)
        else:
            rig.batcher.unpin(key)
        rig.batcher.check_idle()
    for number in range(4):
        rig.batcher.unpin(str(number))
    rig.batcher.check_idle()


def test_a_lost_worker_takes_its_pins_along() -> None:
    rig = make_rig(pages=PAGES)
    pin(rig, "a", warmed(rig, 1, 8 * PAGE))
    rig.batcher.fail_all(RuntimeError("lost"))
    rig.batcher.unpin("a")
    rig.batcher.check_idle()
