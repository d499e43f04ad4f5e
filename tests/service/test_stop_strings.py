"""Stop strings against a naive search of the whole text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemserve.service.text.stop_strings import StopMatcher

STOPS = st.lists(st.text("abE", min_size=1, max_size=4), min_size=0, max_size=3)


def cut_naively(text: str, stops: list[str]) -> str:
    """Before the match that is complete first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher


@given(text=st.text("abEc", max_size=30), stops=STOPS, seed=st.integers(0, 1000))
def test_b42_the_shown_text_is_the_naive_cut_however_the_text_is_split(
    text: str, stops: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    pieces, rest = list[str](), text
    while rest:
        size = rng.randint(1, 4)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    shown, matcher = run(pieces, stops)
    assert "".join(shown) == cut_naively(text, stops)
    assert matcher.matched == (cut_naively(text, stops) != text)


@given(text=st.text("abE", max_size=20), stops=STOPS)
def test_b42_no_part_of_a_coming_match_is_ever_shown(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for character in text:
        shown += matcher.feed(character)
        assert cut_naively(text, stops).startswith(shown)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["ab", "E", "ND cd"], ["END"], ["ab", "", "", ""]),
        (["ab", "E", "X"], ["END"], ["ab", "", "EX", ""]),
        (["ab", "E"], ["END"], ["ab", "", "E"]),
        (["a", "b"], ["b", "ab"], ["", "", ""]),
        (["xb", "y"], ["b", "ab"], ["x", "", ""]),
    ],
)
def test_b42_pieces_are_held_only_while_they_may_become_a_stop(
    pieces: list[str], stops: list[str], expected: list[str]
) -> None:
    assert run(pieces, stops)[0] == expected
