"""Free pages: never handed out twice, consecutive where they can be."""

import numpy as np
import pytest

from stemserve.service.batching.pages.page_allocator import PageAllocator


def test_pages_come_in_one_run_where_there_is_one() -> None:
    allocator = PageAllocator(10)
    first = allocator.allocate(3)
    allocator.allocate(2)
    allocator.free(first)
    assert allocator.allocate(4).tolist() == [5, 6, 7, 8]
    assert allocator.allocate(4).tolist() == [0, 1, 2, 9]


def test_growth_goes_on_behind_the_last_page_if_that_is_free() -> None:
    allocator = PageAllocator(6)
    low = allocator.allocate(2)
    high = allocator.allocate(2)
    allocator.free(low)
    assert allocator.allocate(1, after=int(high[-1])).tolist() == [4]
    assert allocator.allocate(1, after=int(high[0])).tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_hands_a_page_out_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    allocator = PageAllocator(40)
    held: list[int] = []
    for _ in range(300):
        if rng.random() < 0.5 and allocator.num_free:
            pages = allocator.allocate(
                int(rng.integers(allocator.num_free + 1)), after=int(rng.integers(-1, 40))
            )
            assert not set(pages.tolist()) & set(held)
            held += pages.tolist()
        elif held:
            count = int(rng.integers(1, len(held) + 1))
            rng.shuffle(held)
            allocator.free(held[:count])
            held = held[count:]
        assert allocator.num_free == 40 - len(held)
        assert [page for page in range(40) if not allocator.is_free(page)] == sorted(held)


def test_a_page_that_is_freed_twice_is_a_fault() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(pages[:1])


def test_more_than_the_free_pages_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="4 pages asked of 3"):
        PageAllocator(3).allocate(4)
