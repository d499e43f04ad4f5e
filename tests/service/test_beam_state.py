"""Beams over tables of log-probabilities, beside a search that keeps every candidate in a list."""

from collections.abc import Set

import numpy as np
import pytest

from stemserve.service.batching.beams.beam_state import BeamState, Hypothesis, candidates_needed
from stemserve.service.request import BeamSpec, EarlyStopping, Float32

MODES = (EarlyStopping.HEURISTIC, EarlyStopping.FIRST, EarlyStopping.NEVER)
A, B, EOS = 0, 1, 2


def spec(
    width: int,
    *,
    best: int | None = None,
    length_penalty: float = 0.0,
    early_stopping: str = EarlyStopping.NEVER,
    min_new_tokens: int = 0,
) -> BeamSpec:
    return BeamSpec(
        width=width,
        best=best or width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        min_new_tokens=min_new_tokens,
    )


def searched(beams: BeamSpec, ends: Set[int], most: int, table: Float32) -> list[Hypothesis]:
    """The next token's log-probabilities are the row of the last token; row -1 begins."""
    state, count = BeamState(beams, ends, most), candidates_needed(beams, ends, table.shape[1])
    last = np.array([-1])
    while not state.is_done:
        rows = table[last]
        ids = np.argsort(-rows, axis=1, kind="stable")[:, :count].astype(np.int32)
        state.advance(ids, np.take_along_axis(rows, ids, 1))
        last = state.last_tokens
    return state.best


def plain(
    beams: BeamSpec, ends: Set[int], most: int, table: Float32
) -> list[tuple[float, list[int]]]:
    """Scores and tokens by the definition, with all continuations of all beams."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        found = [
            (score + float(table[tokens[-1] if tokens else -1, token]), [*tokens, token])
            for score, tokens in running
            for token in range(table.shape[1])
            if not (token in ends and length <= beams.min_new_tokens)
        ]
        found.sort(key=lambda pair: -pair[0])
        for score, tokens in found[: beams.width]:
            if tokens[-1] in ends or length == most:
                done.append((score / length**beams.length_penalty, tokens))
        done = sorted(done, key=lambda pair: -pair[0])[: beams.width]
        running = [pair for pair in found if pair[1][-1] not in ends][: beams.width]
        if not running or length == most:
            break
        if len(done) == beams.width:
            never = beams.early_stopping == EarlyStopping.NEVER and beams.length_penalty > 0
            could = running[0][0] / (most if never else length) ** beams.length_penalty
            if beams.early_stopping == EarlyStopping.FIRST or beams.width == 1:
                break
            if could <= done[-1][0]:
                break
    return done[: beams.best]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(30))
def test_any_search_finds_what_a_plain_one_does(seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    vocab, most = int(rng.integers(4, 30)), int(rng.integers(1, 12))
    logits = rng.normal(0, 2, (vocab, vocab))
    table = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    ends = frozenset(rng.integers(0, vocab, int(rng.integers(0, 4))).tolist())
    width = int(rng.integers(1, 9))
    beams = spec(
        width,
        best=int(rng.integers(1, width + 1)),
        length_penalty=float(rng.choice([0.0, 0.7, 1.0, 2.0, -1.0])),
        early_stopping=mode,
        min_new_tokens=int(rng.integers(0, 3)),
    )
    found, expected = searched(beams, ends, most, table), plain(beams, ends, most, table)
    assert [hypothesis.token_ids.tolist() for hypothesis in found] == [t for _, t in expected]
    scores = [hypothesis.score for hypothesis in found]
    np.testing.assert_allclose(scores, [score for score, _ in expected], rtol=1e-5)
    for hypothesis in found:
        summed = hypothesis.logprobs.sum() / len(hypothesis.token_ids) ** beams.length_penalty
        np.testing.assert_allclose(summed, hypothesis.score, rtol=1e-5)
        assert hypothesis.has_end == (hypothesis.token_ids[-1] in ends)


B39 = np.log(
    np.array([[0.4, 0.3, 0.3], [0.05, 0.05, 0.9], [0.6, 0.4, 1e-9]], np.float32)
)  # rows: after A, after B, at the start


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        (0.0, [([B, EOS], -1.0217), ([A, A], -1.4271)]),
        (1.0, [([B, EOS], -0.5108), ([A, A], -0.7136)]),
    ],
)
def test_b39_the_end_token_counts_and_does_not_starve_the_beam(
    penalty: float, expected: list[tuple[list[int], float]]
) -> None:
    found = searched(spec(2, length_penalty=penalty), {EOS}, 2, B39)
    assert [hypothesis.token_ids.tolist() for hypothesis in found] == [t for t, _ in expected]
    scores = [hypothesis.score for hypothesis in found]
    np.testing.assert_allclose(scores, [score for _, score in expected], atol=1e-4)


def test_equal_candidates_stay_in_the_order_of_their_beams_and_ids() -> None:
    table = np.full((4, 4), -np.log(4), np.float32)
    found = searched(spec(3), frozenset(), 2, table)
    assert [hypothesis.token_ids.tolist() for hypothesis in found] == [[0, 0], [0, 1], [0, 2]]


def test_a_vocabulary_too_small_for_the_width_gives_fewer_sequences() -> None:
    table = np.full((2, 2), -np.log(2), np.float32)
    assert len(searched(spec(8), frozenset(), 2, table)) == 4
