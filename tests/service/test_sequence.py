"""Where the tokens of a sequence lie."""

import numpy as np
import pytest

from stemserve.service.batching.pages.sequence import table_slots


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("page_size", [4, 16])
def test_slots_count_through_the_pages_of_the_table(seed: int, page_size: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.permutation(50)[:7].astype(np.int32)
    start = int(rng.integers(0, 7 * page_size))
    stop = int(rng.integers(start, 7 * page_size + 1))
    wanted = [
        table[position // page_size] * page_size + position % page_size
        for position in range(start, stop)
    ]
    found = table_slots(table, start, stop, page_size)
    assert found.tolist() == wanted
    assert found.dtype == np.int32
    found[:] = -1  # the caller's own
    assert table.min() >= 0
