"""A step's result as arrays, checked against what the step asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import (
    NO_FLOAT32,
    NO_INT32,
    unpack_float32,
    unpack_int32,
)
from stemserve.service.batching.steps.step_builder import IssuedStep
from stemserve.service.errors import EngineFault
from stemserve.service.request import Float32, Int32, TopTokens

Bool = NDArray[np.bool_]


class Drawn:
    """The tokens that a step drew: of each sample, one in each sub-step."""

    def __init__(self, issued: IssuedStep, result: worker_pb2.StepResult) -> None:
        """Raises EngineFault where they are not as many as were asked for."""
        count = len(issued.sample_rows)
        self._failed: set[int] = set()
        self._by_step = (issued.repeat, -1 if count else 0)
        self._tokens, self._logprobs = NO_INT32, NO_FLOAT32
        if not (count or result.sampled_tokens or result.sampled_logprobs or result.top_indptr):
            self._top_indptr, self._top_ids, self._top_logprobs = NO_INT32, NO_INT32, NO_FLOAT32
            self.has_tops = False
            return
        tokens = unpack_int32(result.sampled_tokens)
        logprobs = unpack_float32(result.sampled_logprobs)
        self._top_indptr = unpack_int32(result.top_indptr)  # [draws + 1]; empty: nobody asks
        self._top_ids = unpack_int32(result.top_ids)
        self._top_logprobs = unpack_float32(result.top_logprobs)
        _check_count("sampled_tokens", tokens, count)
        _check_count("sampled_logprobs", logprobs, count)
        _check_count("top_logprobs", self._top_logprobs, len(self._top_ids))
        if len(self._top_indptr):
            _check_count("top_indptr", self._top_indptr, count + 1)
            _check_count("top_ids", self._top_ids, int(self._top_indptr[-1]))
        self._tokens, self._logprobs = tokens, logprobs
        self.has_tops = len(self._top_indptr) > 0
        if result.failed_rows:
            is_failed = _are_in(issued.sample_rows, unpack_int32(result.failed_rows))
            self._failed.update(np.flatnonzero(is_failed).tolist())

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Of each sample, in the order in which it drew them."""
        tokens: list[list[int]] = self._tokens.reshape(self._by_step).T.tolist()
        return tokens

    @cached_property
    def logprobs(self) -> list[list[float]]:
        """Of the tokens."""
        logprobs: list[list[float]] = self._logprobs.reshape(self._by_step).T.tolist()
        return logprobs

    def good_steps(self, sample: int, steps: int) -> int:
        """How many of the sample's draws come before one whose logits were not finite."""
        if not self._failed:
            return steps
        draws = range(sample, sample + steps * len(self.tokens), len(self.tokens))
        return next((n for n, at in enumerate(draws) if at in self._failed), steps)

    def some_failed(self, first: int, count: int) -> bool:
        """Whether logits were not finite for one of so many samples from `first` on; no burst."""
        return not self._failed.isdisjoint(range(first, first + count))

    def verified(self, first: int, draft: Sequence[int]) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of samples one behind the other, each drawn behind one token
        more of the draft: up to the first that is not in the draft, or could not be drawn."""
        ids: list[int] = []
        for at in range(first, first + len(draft) + 1):
            if at in self._failed or (ids and ids[-1] != draft[len(ids) - 1]):
                break
            ids.append(self.tokens[at][0])
        return ids, [self.logprobs[at][0] for at in range(first, first + len(ids))]

    def top_arrays(self, first: int, counts: Int32, most: int) -> tuple[Int32, Float32]:
        """[samples, most] ids and log-probabilities of samples from `first` on that read counts[i]
        each; no burst.

        Behind a sample's own there are -inf. Raises EngineFault where they are not there.
        """
        indptr = self._top_indptr[first : first + len(counts) + 1]
        if len(indptr) <= len(counts) or (indptr[1:] - indptr[:-1] != counts).any():
            raise EngineFault("the worker did not answer as many top_logprobs as were asked for")
        begin, end = int(indptr[0]), int(indptr[-1])
        ids, logprobs = self._top_ids[begin:end], self._top_logprobs[begin:end]
        if len(ids) == len(counts) * most:
            return ids.reshape(-1, most), logprobs.reshape(-1, most)
        is_there = np.arange(most, dtype=np.int32) < counts[:, None]
        all_ids: Int32 = np.zeros(is_there.shape, np.int32)
        all_logprobs: Float32 = np.full(is_there.shape, -np.inf, np.float32)
        all_ids[is_there], all_logprobs[is_there] = ids, logprobs
        return all_ids, all_logprobs

    def tops(self, sample: int, sub_step: int) -> TopTokens:
        at = sub_step * len(self.tokens) + sample
        first, end = self._top_indptr[at : at + 2].tolist()
        ids: list[int] = self._top_ids[first:end].tolist()
        logprobs: list[float] = self._top_logprobs[first:end].tolist()
        return TopTokens(ids, logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    step_id: int
    gather_logprobs: Float32  # [ids]
    gather_argmax: Int32  # [gathers]
    has_failed: bool  # some row
    gather_failed: Bool  # [gathers] logits were not finite
    class_scores: Float32  # [classified, classes]
    class_failed: Bool  # [classified]
    drawn: Drawn


def read_outputs(
    issued: IssuedStep, result: worker_pb2.StepResult, num_classes: int
) -> StepOutputs:
    """Raises EngineFault where the result does not answer the step, never a wrong number."""
    if result.error:
        raise EngineFault(f"the worker failed in this step: {result.error}")
    failed = unpack_int32(result.failed_rows)
    scores = unpack_float32(result.class_scores)
    if len(scores) != len(issued.classify_rows) * num_classes:
        raise EngineFault(
            f"the worker answered {len(scores)} class_scores for "
            f"{len(issued.classify_rows)} rows of {num_classes} classes"
        )
    gather_logprobs = unpack_float32(result.gather_logprobs)
    gather_argmax = unpack_int32(result.gather_argmax)
    _check_count("gather_logprobs", gather_logprobs, issued.num_gather_ids)
    _check_count("gather_argmax", gather_argmax, len(issued.gather_rows))
    return StepOutputs(
        step_id=issued.step_id,
        gather_logprobs=gather_logprobs,
        gather_argmax=gather_argmax,
        has_failed=bool(len(failed)),
        gather_failed=_are_in(issued.gather_rows, failed),
        class_scores=scores.reshape(len(issued.classify_rows), num_classes),
        class_failed=_are_in(issued.classify_rows, failed),
        drawn=Drawn(issued, result),
    )


def _are_in(rows: Int32, failed: Int32) -> Bool:
    return np.isin(rows, failed) if len(failed) else np.zeros(len(rows), np.bool_)


def _check_count(name: str, found: NDArray[Any], wanted: int) -> None:
    if len(found) != wanted:
        raise EngineFault(f"the worker answered {len(found)} {name} where {wanted} were asked for")
