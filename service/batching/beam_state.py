"""Beam search without a model: likely continuations in, the beams that go on and the best out.

What ends, what goes on and when the search is over is as in transformers' `generate`; a width of 1
is greedy. Of equal candidates the one of the better beam stays, then the likelier, then the lower
id.
"""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import BeamSpec, EarlyStopping, Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hypothesis:
    """A sequence that has ended."""

    score: float  # sum of log-probabilities / tokens ** length_penalty
    token_ids: Int32  # [tokens], the end id among them
    logprobs: Float32  # [tokens], raw
    has_end: bool  # by an end id; False: it has as many tokens as it may have


def candidates_needed(spec: BeamSpec, end_ids: Set[int], vocab_size: int) -> int:
    """Continuations that each beam must offer, so that width of them end no beam."""
    ends = sum(token_id < vocab_size for token_id in end_ids)
    return min(vocab_size, spec.width + ends)


class BeamState:
    def __init__(self, spec: BeamSpec, end_ids: Set[int], max_new_tokens: int) -> None:
        self._spec = spec
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._max_new_tokens = max_new_tokens
        self._tokens: Int32 = np.zeros((1, max_new_tokens), np.int32)  # [live, tokens]
        self._logprobs: Float32 = np.zeros((1, max_new_tokens), np.float32)
        self._scores: Float32 = np.zeros(1, np.float32)  # [live], best first
        self._hypotheses: list[Hypothesis] = []  # best first, at most width
        self.length = 0  # tokens that each live beam has
        self.is_done = False
        self.searched_tokens = 0  # that were generated, for whatever beam

    @property
    def num_live(self) -> int:
        return len(self._scores)

    @property
    def last_tokens(self) -> Int32:  # [live]
        return self._tokens[:, self.length - 1]

    @property
    def best(self) -> list[Hypothesis]:
        """At most as many as are asked for; fewer where the vocabulary does not give more."""
        return self._hypotheses[: self._spec.best]

    def advance(
        self, ids: Int32, logprobs: Float32, accepts: Callable[[int, int], bool] | None = None
    ) -> Int32:
        """Take each live beam's likeliest next tokens, [live, candidates], likeliest first; with
        -inf it is none.

        `accepts` says of a beam and a token whether they are a sequence that may be cut here, by
        its length. Returns the beam that each new one goes on from, [new live]; `is_done` says that
        none does.
        """
        ends = np.isin(ids, self._end_ids)
        if self.length < self._spec.min_new_tokens:
            logprobs = np.where(ends, np.float32(-np.inf), logprobs)
        scores = (self._scores[:, None] + logprobs).ravel()
        self.searched_tokens += self.num_live
        length, width = self.length + 1, self._spec.width
        is_last = length == self._max_new_tokens
        ended = [at for at in _best(scores, width).tolist() if is_last or ends.flat[at]]
        if accepts is not None:
            columns = ids.shape[1]
            tokens: list[int] = ids.ravel()[ended].tolist()
            ended = [
                at
                for at, token in zip(ended, tokens, strict=True)
                if ends.flat[at] or accepts(at // columns, token)
            ]
        self._end(ended, ids, logprobs, scores)
        going_on = np.empty(0, np.int64)
        if not is_last:
            going_on = _best(np.where(ends.ravel(), np.float32(-np.inf), scores), width)
        parents, column = np.divmod(going_on, ids.shape[1])
        self._tokens = self._tokens[parents]
        self._logprobs = self._logprobs[parents]
        self._tokens[:, self.length] = ids[parents, column]
        self._logprobs[:, self.length] = logprobs[parents, column]
        self._scores = scores[going_on]
        self.length = length
        self.is_done = not len(going_on) or not self._may_improve()
        return parents.astype(np.int32)

    def keep(self, going_on: NDArray[np.bool_]) -> None:
        """Of the live beams, the others are given up."""
        self._tokens = self._tokens[going_on]
        self._logprobs = self._logprobs[going_on]
        self._scores = self._scores[going_on]
        self.is_done = self.is_done or not self.num_live or not self._may_improve()

    def _end(self, ended: list[int], ids: Int32, logprobs: Float32, scores: Float32) -> None:
        """Keep the best of the hypotheses there were and those that end now."""
        length = self.length + 1
        for at in ended:
            beam, column = divmod(at, ids.shape[1])
            self._hypotheses.append(
                Hypothesis(
                    score=self._normalized(float(scores[at]), length),
                    token_ids=np.append(self._tokens[beam, : self.length], ids[beam, column]),
                    logprobs=np.append(self._logprobs[beam, : self.length], logprobs[beam, column]),
                    has_end=bool(np.isin(ids[beam, column], self._end_ids)),
                )
            )
        self._hypotheses.sort(key=lambda found: -found.score)
        del self._hypotheses[self._spec.width :]

    def _may_improve(self) -> bool:
        spec = self._spec
        if len(self._hypotheses) < spec.width:
            return True
        if spec.early_stopping == EarlyStopping.FIRST or spec.width == 1:
            return False
        never = spec.early_stopping == EarlyStopping.NEVER
        longest = never and spec.length_penalty > 0
        length = self._max_new_tokens if longest else self.length
        best = self._normalized(float(self._scores[0]), length)
        return best > self._hypotheses[-1].score

    def _normalized(self, score: float, tokens: int) -> float:
        return score / math.pow(tokens, self._spec.length_penalty)


def _best(scores: Float32, count: int) -> NDArray[np.int64]:
    """Where the largest are, in order; of equal ones the first. -inf is none."""
    found = np.flatnonzero(scores > -np.inf)
    if len(found) > count:
        kept = scores[found]
        border = np.partition(kept, len(kept) - count)[len(kept) - count]
        found = found[kept >= border]
    return found[np.argsort(-scores[found], kind="stable")][:count]
