"""Drafts are what followed before; what they are worth is known without verifying them."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.service.toy_jobs import int32

from stemserve.service.batching.samples import drafter as drafter_module
from stemserve.service.batching.samples.drafter import (
    LONGEST_MATCH,
    SHORTEST_MATCH,
    Drafter,
    TokenHistory,
)


@pytest.fixture(params=range(3))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def history(tokens: Sequence[int]) -> TokenHistory:
    found = TokenHistory(int32(tokens[:1]), len(tokens))
    for token in tokens[1:]:
        found.add(token)
    return found


def matched(tokens: Sequence[int], end: int) -> int:
    """How many tokens up to `end` are those at the end of all, counted up to the longest match."""
    last = len(tokens) - 1
    count = 0
    while count < LONGEST_MATCH and count <= end and tokens[end - count] == tokens[last - count]:
        count += 1
    return count


def expected_draft(tokens: Sequence[int], most: int) -> list[int]:
    places = [(matched(tokens, end), end) for end in range(len(tokens) - 1)]
    length, end = max(places, default=(0, 0))
    if length < SHORTEST_MATCH:
        return []
    known = list(tokens)
    for at in range(most):
        known.append(known[end + 1 + at])
    return known[len(tokens) :]


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 8, 40])
def test_a_draft_follows_the_longest_and_latest_match(
    vocabulary: int, rng: np.random.Generator
) -> None:
    for _ in range(60):
        tokens: list[int] = rng.integers(0, vocabulary, rng.integers(1, 40)).tolist()
        most = int(rng.integers(1, 12))
        assert history(tokens).draft(most) == expected_draft(tokens, most), tokens


def test_a_loop_goes_on_in_the_draft() -> None:
    assert history([9, 1, 2, 3, 1, 2]).draft(5) == [3, 1, 2, 3, 1]
    assert history([4, 4, 4]).draft(3) == [4, 4, 4]


def test_one_token_alone_is_no_match() -> None:
    assert history([1, 2, 3, 1]).draft(4) == []
    assert history([1]).draft(4) == []


def drafter(prompt: Sequence[int], most: int = 4) -> Drafter:
    return Drafter(int32(prompt), max_new_tokens=400, most=most)


def test_there_is_no_draft_before_the_first_token() -> None:
    assert drafter([1, 2, 1, 2, 1, 2]).draft() == []


def test_copying_is_noticed_though_nothing_is_verified(rng: np.random.Generator) -> None:
    prompt: list[int] = rng.permutation(300).tolist()
    found = drafter(prompt)
    found.add(prompt[:60])
    assert found.expected > 3.5
    assert found.draft() == prompt[60 : 60 + len(found.draft())]


def test_what_never_comes_again_is_expected_to_bring_nothing(rng: np.random.Generator) -> None:
    tokens: list[int] = rng.permutation(300).tolist()
    found = drafter(tokens[:100])
    found.add(tokens[100:])
    assert found.expected == 0
    assert found.draft() == []


def test_verified_or_not_a_draft_counts_alike(rng: np.random.Generator) -> None:
    """Tokens that come one by one, in bursts, or as steps that verify drafts bring them."""
    prompt: list[int] = rng.integers(0, 6, 50).tolist()
    tokens: list[int] = rng.integers(0, 2, 200).tolist()
    one_by_one, in_bursts, verified = (drafter(prompt) for _ in range(3))
    for token in tokens:
        one_by_one.add([token])
    for start in range(0, len(tokens), 7):
        in_bursts.add(tokens[start : start + 7])
    at = 0
    while at < len(tokens):
        draft = verified.draft()
        right = sum(np.cumprod([a == b for a, b in zip(draft, tokens[at:], strict=False)]))
        verified.add(tokens[at : at + right + 1])
        at += right + 1
    assert one_by_one.expected == in_bursts.expected == verified.expected > 0


def test_copying_is_noticed_after_a_long_time_without(rng: np.random.Generator) -> None:
    tokens: list[int] = rng.permutation(400).tolist()
    found = drafter(tokens[:100])
    found.add(tokens[100:300])
    found.add(tokens[10:40])
    assert found.expected > 3


def test_a_draft_that_was_cut_goes_on_where_it_was(rng: np.random.Generator) -> None:
    prompt: list[int] = rng.permutation(100).tolist()
    found = drafter(prompt, most=8)
    found.add(prompt[:9])
    rest = found.draft()
    found.add(rest[:1])
    assert found.draft() == (rest[1:] or prompt[9 + len(rest) : 17 + len(rest)])


class CountedHistory(TokenHistory):
    """Counts the tokens that looks go through."""

    looked_at = 0

    def draft(self, most: int) -> list[int]:
        CountedHistory.looked_at += self._count
        return super().draft(most)


def test_where_nothing_is_copied_a_token_costs_a_look_at_a_quarter_of_the_text(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is one comparison of arrays; nothing is built and kept for them."""
    monkeypatch.setattr(drafter_module, "TokenHistory", CountedHistory)
    monkeypatch.setattr(CountedHistory, "looked_at", 0)
    tokens: list[int] = rng.permutation(9000).tolist()
    found = Drafter(int32(tokens[:8000]), max_new_tokens=1000, most=8)
    for token in tokens[8000:]:
        found.add([token])
    warm_up = 16  # tokens until it looks at every fourth
    assert CountedHistory.looked_at <= (1000 / 4 + warm_up) * 9000
    assert found.draft() == []
