"""Packed sequences against lists of lists."""

import numpy as np
import pytest

from stemserve.service.packed_tokens import PackedTokens, join, pack, repeat
from stemserve.service.request import Int32

Lists = list[list[int]]


def random_lists(seed: int, count: int = 12) -> Lists:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 99, rng.integers(0, 5)).tolist() for _ in range(count)]


def packed(lists: Lists) -> PackedTokens:
    return pack([np.array(part, dtype=np.int32) for part in lists])


def lists_of(tokens: PackedTokens) -> Lists:
    return [tokens[index].tolist() for index in range(len(tokens))]


@pytest.mark.parametrize("seed", range(5))
def test_take_gives_the_rows_in_the_asked_order(seed: int) -> None:
    lists = random_lists(seed)
    rows: Int32 = np.array([3, 3, 0, 11], dtype=np.int32)
    assert lists_of(packed(lists).take(rows)) == [lists[row] for row in rows]


@pytest.mark.parametrize("seed", range(5))
def test_join_puts_each_second_sequence_behind_its_first(seed: int) -> None:
    first, second = random_lists(seed), random_lists(seed + 100)
    joined = [a + b for a, b in zip(first, second, strict=True)]
    assert lists_of(join(packed(first), packed(second))) == joined


@pytest.mark.parametrize("seed", range(5))
def test_heads_cut_what_is_longer(seed: int) -> None:
    lists = random_lists(seed)
    heads = packed(lists).heads(np.full(len(lists), 2, dtype=np.int32))
    assert lists_of(heads) == [part[:2] for part in lists]


def test_repeat_gives_copies() -> None:
    assert lists_of(repeat(np.array([4, 5], dtype=np.int32), 3)) == [[4, 5]] * 3


def test_packing_nothing_gives_no_sequences() -> None:
    assert len(packed([])) == 0
