"""Sets of token sequences, against plain Python."""

import random

import numpy as np
import pytest
from tests.service.token_constraints import OneOf

from stemserve.service.constraints import token_trie
from stemserve.service.constraints.constraint import ConstraintFault
from stemserve.service.constraints.token_trie import TokenTrie
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import pack

END = 40
VOCAB = 45


def trie_of(sequences: list[list[int]]) -> TokenTrie:
    packed = pack([np.array(each, np.int32) for each in sequences])
    return TokenTrie(packed, vocab_size=VOCAB, end_ids=frozenset({END}))


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
            np.testing.assert_array_equal(state.allowed(), expected.allowed())
            legal = np.flatnonzero(np.unpackbits(state.allowed(), bitorder="little")).tolist()
            token = rng.choice(legal)
            if token == END or state.is_closed:
                break
            state.advance(token)
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


def test_a_large_set_takes_few_bytes_a_token() -> None:
    rng = np.random.default_rng(random.SystemRandom().randrange(2**31))
    sequences = list(rng.integers(0, END, (100_000, 8), np.int32))
    trie = TokenTrie(pack(sequences), vocab_size=VOCAB, end_ids=frozenset({END}))
    assert trie.num_bytes <= 8 * 100_000 * 8 + 4 * 100_000


def test_a_set_that_takes_too_much_memory_to_sort_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_trie, "MOST_CELLS", 20)
    with pytest.raises(InvalidRequest, match="4 sequences of up to 6 tokens"):
        trie_of([[1], [2], [3], [1] * 6])
