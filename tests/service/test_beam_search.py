"""Beams under a constraint, over tables of log-probabilities, beside a search by the definition."""

import random

import numpy as np
import pytest
from tests.service.token_constraints import OneOf
from tests.service.toy_jobs import generate_job

from stemserve.service.batching.beams.beam_search import BeamSearch
from stemserve.service.constraints.trie_builder import TrieBuilder
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import pack
from stemserve.service.request import (
    BeamSpec,
    EarlyStopping,
    Float32,
    GenerateJob,
    SampleTokens,
    StopCause,
)

MODES = (EarlyStopping.HEURISTIC, EarlyStopping.FIRST, EarlyStopping.NEVER)
VOCAB = 12
EOS = VOCAB - 1
Sequences = list[list[int]]
Found = list[tuple[list[int], float]]


def job_of(sequences: Sequences, beams: BeamSpec, *, new_tokens: int, as_trie: bool) -> GenerateJob:
    constraint = OneOf(sequences, VOCAB, EOS)
    builder = TrieBuilder({EOS}, vocab_size=VOCAB, longest=99, max_ms=10_000)
    packed = pack([np.array(each, np.int32) for each in sequences])
    return generate_job(
        "search",
        [1],
        max_new_tokens=new_tokens,
        stop_ids=frozenset({EOS}),
        constraint=builder.build("set", packed) if as_trie else constraint,
        beams=beams,
    )


def searched(job: GenerateJob, beams: BeamSpec, table: Float32) -> list[SampleTokens]:
    """Log-probabilities are in the row of the last token, at its place; row -1 begins."""
    search, last = BeamSearch(job, beams, vocab_size=VOCAB), np.array([-1])
    while not search.is_done:
        shape = (search.num_live, search.candidates)
        ids, logprobs = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        for beam, count in enumerate(search.counts(list(range(search.num_live))).tolist()):
            mask = search.mask(beam)
            assert mask is not None
            row = table[search.length, last[beam]][mask.ids]
            best = np.argsort(-row, kind="stable")[:count]
            ids[beam, :count], logprobs[beam, :count] = mask.ids[best], row[best]
        search.advance(ids, logprobs)
        last = search.last_tokens if not search.is_done else last
    return search.answer()


def plain(sequences: Sequences, beams: BeamSpec, most: int, table: Float32) -> Found:
    """By the definition, with all legal continuations of all beams."""
    whole = [[*each, EOS] for each in sequences]
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        found: list[tuple[float, list[int]]] = []
        for score, tokens in running:
            legal = {each[length - 1] for each in whole if each[: length - 1] == tokens}
            if len(legal) > 1 and length <= beams.min_new_tokens:
                legal.discard(EOS)
            row = table[length - 1, tokens[-1] if tokens else -1]
            found += [(score + float(row[token]), [*tokens, token]) for token in sorted(legal)]
        found.sort(key=lambda pair: -pair[0])
        for score, tokens in found[: beams.width]:
            if tokens[-1] == EOS or (length == most and tokens in sequences):
                done.append((score / length**beams.length_penalty, tokens))
        done = sorted(done, key=lambda pair: -pair[0])[: beams.width]
        running = [pair for pair in found if pair[1][-1] != EOS][: beams.width]
        if not running or length == most:
            break
        if len(done) == beams.width:
            never = beams.early_stopping == EarlyStopping.NEVER and beams.length_penalty > 0
            could = running[0][0] / (most if never else length) ** beams.length_penalty
            if beams.early_stopping == EarlyStopping.FIRST or beams.width == 1:
                break
            if could <= done[-1][0]:
                break
    return [(tokens, score) for score, tokens in done[: beams.best]]


def random_sequences(rng: random.Random) -> Sequences:
    alphabet = rng.choice([1, 2, 5, EOS])
    count = rng.choice([1, 2, 10, 80])
    return [rng.choices(range(alphabet), k=rng.randrange(1, 8)) for _ in range(count)]


@pytest.mark.parametrize("as_trie", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", range(25))
def test_any_search_finds_what_a_plain_one_does(run: int, mode: str, as_trie: bool) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    logits = np.random.default_rng(seed).normal(0, 2, (9, VOCAB, VOCAB))
    table = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    sequences, width = random_sequences(rng), rng.choice([1, 2, 3, 8, 40, 256])
    beams = BeamSpec(
        width=width,
        best=rng.randrange(1, width + 1),
        length_penalty=rng.choice([0.0, 0.7, 1.0, 2.0, -1.0]),
        early_stopping=mode,
        min_new_tokens=rng.choice([0, 0, 3]),
    )
    most = rng.choice([9, 9, 9, 4])
    job = job_of(sequences, beams, new_tokens=most, as_trie=as_trie)
    found, expected = searched(job, beams, table), plain(sequences, beams, most, table)
    told = [news for news in found if news.finish != StopCause.NONE_LEFT]
    assert [list(news.token_ids) for news in told] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([news.score for news in told], [s for _, s in expected], rtol=1e-5)
    assert [news.sample for news in found] == list(range(beams.best))
    for news in told:
        ended = news.token_ids[-1] == EOS
        assert list(news.token_ids)[: -1 if ended else None] in sequences
        assert news.finish == (StopCause.STOP_ID if ended else StopCause.COMPLETE)
    for news in found[len(told) :]:
        assert (list(news.token_ids), news.score) == ([], -np.inf)


def test_a_set_without_a_sequence_that_fits_has_none_left() -> None:
    beams = BeamSpec(width=4, best=2, length_penalty=1.0, early_stopping=EarlyStopping.FIRST)
    job = job_of([[1, 2, 3], [1, 2, 4]], beams, new_tokens=2, as_trie=True)
    table = np.full((2, VOCAB, VOCAB), -np.log(VOCAB), np.float32)
    assert [news.finish for news in searched(job, beams, table)] == [StopCause.NONE_LEFT] * 2


def test_a_constraint_without_a_first_token_is_refused() -> None:
    beams = BeamSpec(width=2, best=1, length_penalty=1.0, early_stopping=EarlyStopping.FIRST)
    job = generate_job(
        "search", [1], max_new_tokens=3, constraint=OneOf([], VOCAB, EOS), beams=beams
    )
    with pytest.raises(InvalidRequest, match="no first token"):
        BeamSearch(job, beams, vocab_size=VOCAB)
