"""Calls of every kind over token ids that share prefixes, and what must hold of each answer."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, token_blob

Int32 = NDArray[np.int32]

PREFIXES = 12
PREFIX_TOKENS = (1, 600)  # shortest and longest
ITEM_TOKENS, MOST_ITEMS = 24, 40
NEW_TOKENS, SAMPLES = 40, 8
MOST_BEAMS, BEAM_TOKENS = 8, 20
LABELS = 3


class WrongAnswer(Exception):
    """What is wrong with an answer."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Prefixes that all callers share, so that calls meet in the cache and in steps."""

    prefixes: list[Int32]
    vocab: int
    numpy_rng: np.random.Generator

    @classmethod
    def drawn(cls, vocab: int, seed: int) -> "Traffic":
        rng = np.random.default_rng(seed)
        whole = rng.integers(0, vocab, PREFIX_TOKENS[1], dtype=np.int32)
        ends = rng.integers(*PREFIX_TOKENS, PREFIXES)
        # Half of them begin alike.
        alike = [whole[:end] for end in ends[: PREFIXES // 2]]
        lengths: list[int] = ends[PREFIXES // 2 :].tolist()
        others: list[Int32] = [rng.integers(0, vocab, end, dtype=np.int32) for end in lengths]
        return cls(prefixes=[*alike, *others], vocab=vocab, numpy_rng=rng)

    async def score_labels(self, client: Client, rng: random.Random) -> None:
        first = rng.sample(range(self.vocab), LABELS)
        labels = [np.array([token, *self._tokens(rng.randint(0, 1))], np.int32) for token in first]
        mode = inference_pb2.LabelProbabilities(label_tokens=_packed(labels))
        scores = await client.score_tokens(self._items(rng), mode, contexts=[self._context(rng)])
        _check(bool(np.isfinite(scores.scores).all()), "a probability is not finite")
        _check(bool((scores.scores >= 0).all()), "a probability is negative")
        _check(bool((scores.label_mass <= 1 + 1e-3).all()), "labels have more than all of the mass")

    async def score_likelihoods(self, client: Client, rng: random.Random) -> None:
        mode = inference_pb2.LogLikelihood()
        scores = await client.score_tokens(self._items(rng), mode, contexts=[self._context(rng)])
        _check(bool(np.isfinite(scores.scores).all()), "a log-likelihood is not finite")
        _check(bool((scores.scores <= 0).all()), "a log-likelihood is above 0")

    async def generate(self, client: Client, rng: random.Random) -> None:
        samples, wanted = rng.choice((1, 1, SAMPLES)), rng.randint(1, NEW_TOKENS)
        tokens = dict.fromkeys(range(samples), 0)
        async for step in client.generate(self._request(rng, samples, wanted)):
            for news in step.news:
                tokens[news.sample] += len(news.token_ids)
                _check(bool(np.isfinite(news.logprobs).all()), "a log-probability is not finite")
                inside = all(0 <= token < self.vocab for token in news.token_ids)
                _check(inside, "a token is not in the vocabulary")
        _check(set(tokens.values()) == {wanted}, f"{tokens} tokens instead of {wanted} of each")

    async def search(self, client: Client, rng: random.Random) -> None:
        width, wanted = rng.randint(1, MOST_BEAMS), rng.randint(1, BEAM_TOKENS)
        request = inference_pb2.GenerateRequest(
            prompt=self._context(rng),
            n=rng.randint(1, width),
            max_new_tokens=wanted,
            beam_search=inference_pb2.BeamSearch(
                width=width, length_penalty=rng.choice((0.0, 1.0, 2.0))
            ),
            ignore_eos=True,
        )
        found = [news async for step in client.generate(request) for news in step.news]
        scores = [news.score for news in found if news.score is not None]
        _check(len(scores) == len(found) == request.n, f"{len(found)} beams instead of {request.n}")
        _check(bool(np.isfinite(scores).all()), "a beam's score is not finite")
        _check(scores == sorted(scores, reverse=True), "the beams are not best first")
        _check(len({news.token_ids for news in found}) == request.n, "two beams are alike")
        _check({len(news.token_ids) for news in found} == {wanted}, f"beams are not {wanted} long")

    async def leave(self, client: Client, rng: random.Random) -> None:
        """A call that its client gives up at any moment."""
        call = rng.choice((self.score_labels, self.score_likelihoods, self.generate, self.search))
        running = asyncio.ensure_future(call(client, rng))
        await asyncio.wait((running,), timeout=rng.expovariate(10.0))
        running.cancel()
        await asyncio.wait((running,))
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error

    def _request(self, rng: random.Random, n: int, tokens: int) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
            top_k=rng.choice((0, 0, 1, 20)),
            top_p=rng.choice((1.0, 1.0, 0.9, 0.1)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            banned_token_ids=[rng.randrange(self.vocab)] if rng.random() < 0.2 else [],
        )
        return inference_pb2.GenerateRequest(
            prompt=self._context(rng),
            sampling=sampling,
            n=n,
            max_new_tokens=tokens,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=rng.choice((0, 0, 3)),
            priority=rng.choice((0, 0, 1)),
        )

    def _context(self, rng: random.Random) -> inference_pb2.Context:
        own = self._tokens(rng.randint(0, 40))
        return inference_pb2.Context(
            tokens=token_blob(np.concatenate([rng.choice(self.prefixes), own]))
        )

    def _items(self, rng: random.Random) -> list[Int32]:
        return [
            self._tokens(rng.randint(1, ITEM_TOKENS)) for _ in range(rng.randint(1, MOST_ITEMS))
        ]

    def _tokens(self, count: int) -> Int32:
        return self.numpy_rng.integers(0, self.vocab, count, dtype=np.int32)


def _packed(sequences: list[Int32]) -> inference_pb2.PackedTokens:
    ends = np.cumsum([0, *map(len, sequences)]).tolist()
    return inference_pb2.PackedTokens(tokens=token_blob(np.concatenate(sequences)), offsets=ends)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise WrongAnswer(problem)


Kind = Callable[[Client, random.Random], Awaitable[None]]


def kinds(traffic: Traffic) -> Mapping[Kind, int]:
    """With how often each comes."""
    return {
        traffic.score_labels: 4,
        traffic.score_likelihoods: 4,
        traffic.generate: 4,
        traffic.search: 1,
        traffic.leave: 2,
    }
