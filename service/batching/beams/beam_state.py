"""Beam search without a model: likely continuations in, the beams that go on and the best out.

What ends, what goes on and when the search is over is as in transformers' `generate`; a width of 1
is greedy. Of equal candidates the one of the better beam stays, then the likelier, then the lower
id.
"""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stemserve.service.batching.beams.beam_history import BeamHistory
from stemserve.service.request import BeamSpec, EarlyStopping, Float32, Int32

FIRST_LOOKED_AT = 4  # times as many candidates as may go on


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


class _Ended(NamedTuple):
    score: float
    beam: int  # when it had `length` tokens
    length: int
    token: int  # behind them, its last
    logprob: float
    has_end: bool


class BeamState:
    def __init__(self, spec: BeamSpec, end_ids: Set[int], max_new_tokens: int) -> None:
        self._spec = spec
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._max_new_tokens = max_new_tokens
        self._history = BeamHistory()
        self._scores: Float32 = np.zeros(1, np.float32)  # [live], best first
        self._ended: list[_Ended] = []  # best first, at most width
        self.length = 0  # tokens that each live beam has
        self.is_done = False
        self.searched_tokens = 0  # that were generated, for whatever beam

    @property
    def num_live(self) -> int:
        return len(self._scores)

    @property
    def last_tokens(self) -> Int32:  # [live]
        return self._history.last_tokens

    @property
    def best(self) -> list[Hypothesis]:
        """At most as many as are asked for; fewer where the vocabulary does not give more."""
        ended = self._ended[: self._spec.best]
        beams = np.array([end.beam for end in ended], np.int32)
        lengths = np.array([end.length for end in ended], np.int32)
        before = self._history.sequences(beams, lengths)
        return [
            Hypothesis(
                score=end.score,
                token_ids=np.append(tokens, np.int32(end.token)),
                logprobs=np.append(logprobs, np.float32(end.logprob)),
                has_end=end.has_end,
            )
            for end, (tokens, logprobs) in zip(ended, before, strict=True)
        ]

    @property
    def best_tokens(self) -> int:
        """That they have."""
        return sum(end.length + 1 for end in self._ended[: self._spec.best])

    def advance(
        self, ids: Int32, logprobs: Float32, accepts: Callable[[int, int], bool] | None = None
    ) -> Int32:
        """Take each live beam's likeliest next tokens, [live, candidates], likeliest first; with
        -inf it is none.

        `accepts` says of a beam and a token whether they are a sequence that may be cut here, by
        its length. Returns the beam that each new one goes on from, [new live]; `is_done` says that
        none does.
        """
        ends = self._are_ends(ids)
        if ends is not None and self.length < self._spec.min_new_tokens:
            logprobs = np.where(ends, np.float32(-np.inf), logprobs)
        scores = self._scores[:, None] + logprobs
        self.searched_tokens += self.num_live
        length, width = self.length + 1, self._spec.width
        is_last = length == self._max_new_tokens
        best = _best(scores, width)
        ended = best if is_last else best[:0]
        if ends is not None and not is_last:
            ended = best[ends.ravel()[best]]
        if accepts is not None:
            ended = self._acceptable(ended, ids, ends, accepts)
        self._end(ended, ids, logprobs, scores, ends)
        going_on = best[:0] if is_last else best
        if ends is not None and not is_last:
            going_on = _best(np.where(ends, np.float32(-np.inf), scores), width)
        parents = going_on // ids.shape[1]
        self._history.add(parents, ids.ravel()[going_on], logprobs.ravel()[going_on])
        self._scores = scores.ravel()[going_on]
        self.length = length
        self.is_done = not len(going_on) or not self._may_improve()
        new_parents: Int32 = parents.astype(np.int32)
        return new_parents

    def keep(self, going_on: NDArray[np.bool_]) -> None:
        """Of the live beams, the others are given up."""
        self._history.keep(going_on)
        self._scores = self._scores[going_on]
        self.is_done = self.is_done or not self.num_live or not self._may_improve()

    def _are_ends(self, ids: Int32) -> NDArray[np.bool_] | None:  # of the shape of ids
        """None: no id is one."""
        if not len(self._end_ids):
            return None
        ends = np.isin(ids, self._end_ids)
        return ends if ends.any() else None

    def _acceptable(
        self,
        ended: NDArray[np.intp],
        ids: Int32,
        ends: NDArray[np.bool_] | None,
        accepts: Callable[[int, int], bool],
    ) -> NDArray[np.intp]:
        """Those that end with an end id, or may be cut."""
        columns = ids.shape[1]
        kept: list[bool] = [
            (ends is not None and bool(ends.flat[at])) or accepts(at // columns, int(ids.flat[at]))
            for at in map(int, ended)
        ]
        return ended[np.array(kept, np.bool_)]

    def _end(
        self,
        ended: NDArray[np.intp],
        ids: Int32,
        logprobs: Float32,
        scores: Float32,
        ends: NDArray[np.bool_] | None,
    ) -> None:
        """Keep the best of the hypotheses there were and those that end now."""
        if not len(ended):
            return
        columns = ids.shape[1]
        for at in map(int, ended):
            self._ended.append(
                _Ended(
                    score=self._normalized(float(scores.flat[at]), self.length + 1),
                    beam=at // columns,
                    length=self.length,
                    token=int(ids.flat[at]),
                    logprob=float(logprobs.flat[at]),
                    has_end=ends is not None and bool(ends.flat[at]),
                )
            )
        self._ended.sort(key=lambda end: -end.score)
        del self._ended[self._spec.width :]

    def _may_improve(self) -> bool:
        spec = self._spec
        if len(self._ended) < spec.width:
            return True
        if spec.early_stopping == EarlyStopping.FIRST or spec.width == 1:
            return False
        never = spec.early_stopping == EarlyStopping.NEVER
        longest = never and spec.length_penalty > 0
        length = self._max_new_tokens if longest else self.length
        best = self._normalized(float(self._scores[0]), length)
        return best > self._ended[-1].score

    def _normalized(self, score: float, tokens: int) -> float:
        return score / math.pow(tokens, self._spec.length_penalty)


def _best(scores: Float32, count: int) -> NDArray[np.intp]:
    """Where the largest of [rows, columns] are, in order, counted through all rows; of equal ones
    the first. -inf is none. The large ones are likely in the first columns."""
    few, everything = scores[:, : -(-FIRST_LOOKED_AT * count // len(scores))], scores.ravel()
    border = _border(few.ravel(), count)  # nothing below it is among the largest
    is_kept = everything >= border if border > -np.inf else everything > border
    found = is_kept.nonzero()[0]
    kept = everything[found]
    if len(found) > count:
        is_kept = kept >= _border(kept, count)
        found, kept = found[is_kept], kept[is_kept]
    return found[(-kept).argsort(kind="stable")[:count]]


def _border(scores: Float32, count: int) -> float:
    """The least of so many of the largest; -inf where there are not as many."""
    at = len(scores) - count
    return float(np.partition(scores, at)[at]) if at >= 0 else -math.inf
