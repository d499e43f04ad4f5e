"""Sets of token sequences, against plain Python."""

import random

import numpy as np
import pytest
from tests.service.token_constraints import OneOf

from stemserve.service.constraints.constraint import ConstraintFault
from stemserve.service.constraints.token_trie import TokenTrie
from stemserve.service.constraints.trie_builder import TrieBuilder
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import pack

END = 40
VOCAB = 45


LONGEST = 12


def trie_of(sequences: list[list[int]], *, max_ms: int = 10_000) -> TokenTrie:
    builder = TrieBuilder({END, VOCAB + 5}, vocab_size=VOCAB, longest=LONGEST, max_ms=max_ms)
    return builder.build("set", pack([np.array(each, np.int32) for each in sequences]))


@pytest.mark.parametrize("alphabet", [1, 2, 5, 40])
@pytest.mark.parametrize("run", range(25))
def test_a_random_walk_sees_what_a_search_through_all_sequences_sees(
    alphabet: int, run: int
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    rng = random.Random(seed)
    print(f"seed {seed}")
    sequences = [
        rng.choices(range(alphabet), k=rng.randrange(1, 7)) for _ in range(rng.randrange(1, 60))
    ]
    trie, oracle = trie_of(sequences), OneOf(sequences, VOCAB, END)
    for _ in range(10):
        state, expected = trie.start(), oracle.start()
        while True:
            assert (state.is_complete, state.is_closed) == (
                expected.is_complete,
                expected.is_closed,
            )
            legal = state.allowed().ids.tolist()
            assert legal == expected.allowed().ids.tolist()
            token = rng.choice(legal)
            if token == END or state.is_closed:
                break
            left = state
            state = state.fork()
            state.advance(token)
            assert left.allowed().ids.tolist() == legal
            expected.advance(token)


def test_a_token_outside_the_set_is_a_fault() -> None:
    state = trie_of([[1, 2], [1, 4], [3]]).start()
    for token in (0, 2, 4):
        with pytest.raises(ConstraintFault):
            state.advance(token)
    state.advance(1)
    with pytest.raises(ConstraintFault):
        state.advance(3)
    state.advance(4)
    with pytest.raises(ConstraintFault):
        state.advance(4)


def test_stop_ids_may_come_behind_a_whole_sequence() -> None:
    trie = trie_of([[1, 2], [1]])
    assert trie.holds(np.array([5, 2], np.int32)) and not trie.holds(np.array([5], np.int32))
    state = trie.ending_with(np.array([5], np.int32)).start()
    assert state.allowed().ids.tolist() == [1]
    state.advance(1)
    assert state.allowed().ids.tolist() == [2, 5, END]


def test_a_large_set_takes_few_bytes_a_token() -> None:
    rng = np.random.default_rng(random.SystemRandom().randrange(2**31))
    sequences: list[list[int]] = rng.integers(0, END, (100_000, 8)).tolist()
    trie = trie_of([*sequences, sequences[0]])
    assert trie.num_bytes <= 9 * 100_000 * 8 + VOCAB + 8
    assert trie.sequences == len({tuple(each) for each in sequences})


@pytest.mark.parametrize(
    ("sequences", "problem"),
    [
        ([], "none of them empty"),
        ([[1], []], "none of them empty"),
        ([[1, END]], "end-of-sequence"),
        ([[1], [2] * (LONGEST + 1)], f"has {LONGEST + 1} tokens"),
    ],
)
def test_what_cannot_be_a_set_is_refused(sequences: list[list[int]], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        trie_of(sequences)
    assert refused.value.field == "set"


def test_a_set_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(InvalidRequest, match="max_compile_ms"):
        trie_of([[1, 2, 3]], max_ms=-1)
