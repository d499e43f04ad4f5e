"""Pages of contexts, and of generations that go on behind them."""

import numpy as np
import pytest
from tests.service.toy_jobs import int32, random_tokens

from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.sequence import Branch, Chain
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import Int32, Realm

PAGE = 4


def new_step() -> StepBuilder:
    return StepBuilder(1, page_size=PAGE, max_rows=100)


def copies_of(step: StepBuilder, cache: KvCache) -> list[list[int]]:
    """Builds the step; it gets a row, without which it would do nothing."""
    step.rows.add_items(int32([1]), int32([0]), int32([1]), None, 0)
    built = step.finish(cache.tree.release)
    assert built is not None
    copies: list[list[int]] = unpack_int32(built[0].copies).reshape(-1, 3).tolist()
    return copies


def acquire(cache: KvCache, tokens: list[int], *, computed: bool, own_tail: bool = False) -> Chain:
    chain = cache.acquire(int32(tokens), Realm(), new_step(), own_tail=own_tail)
    assert chain is not None
    if computed:
        for node in chain.nodes:
            node.planned = node.size
    return chain


def grown(cache: KvCache, chain: Chain, tokens: list[int]) -> Branch:
    """A generation that has got as far as `tokens`."""
    branch = Branch(chain, capacity=len(tokens), page_size=PAGE)
    step = new_step()
    assert cache.extend(branch, len(tokens), step)
    copies_of(step, cache)
    return branch


def test_a_context_that_ends_inside_a_known_page_reads_that_page() -> None:
    cache = KvCache(8, PAGE)
    whole = acquire(cache, [1, 2, 3, 4, 5, 6, 7], computed=True)
    part = acquire(cache, [1, 2, 3, 4, 5, 6], computed=False)
    assert part.table.tolist() == whole.table.tolist()
    assert part.planned_tokens() == 6 and cache.allocator.num_free == 6


@pytest.mark.parametrize("planned", [0, 1, 2, 3])
def test_a_shared_part_of_a_page_is_copied_as_far_as_it_is_computed(planned: int) -> None:
    cache = KvCache(8, PAGE)
    first = acquire(cache, [1, 2, 3, 4, 5, 6, 7], computed=True)
    first.nodes[1].planned = planned
    step = new_step()
    second = cache.acquire(int32([1, 2, 3, 4, 5, 6, 9, 9]), Realm(), step, own_tail=False)
    assert second is not None
    copied = min(planned, 2)
    assert second.planned_tokens() == 4 + copied
    source, target = int(first.table[1]), int(second.table[1])
    assert copies_of(step, cache) == ([[source, target, copied]] if copied else [])


def test_a_page_that_this_step_computes_is_no_source_of_a_copy() -> None:
    cache = KvCache(8, PAGE)
    step = new_step()
    first = cache.acquire(int32([1, 2, 3]), Realm(), step, own_tail=False)
    assert first is not None
    step.mark_chain(first, 0, 3)
    second = cache.acquire(int32([1, 2, 9]), Realm(), step, own_tail=False)
    assert second is not None
    assert copies_of(step, cache) == [] and second.planned_tokens() == 0


def test_without_room_nothing_is_held() -> None:
    cache = KvCache(3, PAGE)
    cache.tree.release(acquire(cache, [1, 2, 3, 4, 5], computed=True).nodes)
    held = acquire(cache, [7, 7], computed=True)
    assert cache.acquire(int32(random_tokens(1, 12)), Realm(), new_step(), own_tail=False) is None
    assert cache.available_pages == 2
    cache.tree.release(held.nodes)
    assert acquire(cache, random_tokens(1, 12), computed=False)


def test_the_source_of_a_copy_gives_way_where_it_takes_the_last_page() -> None:
    cache = KvCache(1, PAGE)
    cache.tree.release(acquire(cache, [1, 2, 3], computed=True).nodes)
    step = new_step()
    chain = cache.acquire(int32([1, 2, 9]), Realm(), step, own_tail=False)
    assert chain is not None and copies_of(step, cache) == [] and chain.planned_tokens() == 0


def test_one_generation_goes_on_in_the_prompts_page_and_the_others_copy_it() -> None:
    cache = KvCache(8, PAGE)
    chain = acquire(cache, [1, 2, 3, 4, 5, 6], computed=True, own_tail=True)
    step = new_step()
    branches = [Branch(chain, capacity=8, page_size=PAGE) for _ in range(3)]
    assert all(cache.extend(branch, 7, step) for branch in branches)
    tail = int(chain.table[1])
    first_pages = [int(branch.table[1]) for branch in branches]
    assert first_pages[0] == tail and len(set(first_pages)) == 3
    assert copies_of(step, cache) == [[tail, page, 2] for page in first_pages[1:]]


def test_what_a_generation_has_computed_is_found_when_it_has_ended() -> None:
    cache = KvCache(8, PAGE)
    prompt, talk = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    chain = acquire(cache, prompt, computed=True, own_tail=True)
    cache.adopt(grown(cache, chain, talk), chain, int32(talk), Realm())
    cache.tree.release(chain.nodes)
    assert cache.resident_tokens(int32(talk), Realm()) == 10
    assert cache.resident_tokens(int32(prompt), Realm()) == 6
    cache.check_idle({})


@pytest.mark.parametrize("seed", range(20))
def test_generations_of_one_prompt_leave_no_page_behind_but_the_cached_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = KvCache(40, PAGE)
    prompt = random_tokens(seed, int(rng.integers(1, 10)))
    chain = acquire(cache, prompt, computed=True, own_tail=True)
    talks = [prompt + rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(4)]
    branches = [grown(cache, chain, talk) for talk in talks]
    for branch, talk in zip(branches, talks, strict=True):
        if rng.random() < 0.7:
            cache.adopt(branch, chain, int32(talk), Realm())
        else:
            cache.drop(branch)
    cache.tree.release(chain.nodes)
    cache.check_idle({})


def test_a_page_held_by_nobody_is_a_fault() -> None:
    cache = KvCache(4, PAGE)
    tokens: Int32 = int32([1, 2])
    cache.acquire(tokens, Realm(), new_step(), own_tail=False)
    with pytest.raises(RuntimeError, match="held"):
        cache.check_idle({})
