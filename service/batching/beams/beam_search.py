"""A beam search without its pages: the beams, and under a constraint what each may go on with."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stemserve.service.batching.beams.beam_guides import BeamGuides
from stemserve.service.batching.beams.beam_state import BeamState, Hypothesis, candidates_needed
from stemserve.service.constraints.allowed import Allowed
from stemserve.service.constraints.constraint import ConstraintFault
from stemserve.service.errors import InvalidRequest
from stemserve.service.request import (
    BeamSpec,
    Float32,
    GenerateJob,
    Int32,
    SampleTokens,
    StopCause,
)


class BeamSearch:
    def __init__(self, job: GenerateJob, beams: BeamSpec, *, vocab_size: int) -> None:
        """Raises InvalidRequest where the job's constraint leaves no first token."""
        self._spec = beams
        self._max_new_tokens = job.max_new_tokens
        self._guides = None
        self._masks_take_long = job.constraint is not None and job.constraint.masks_take_long
        if job.constraint is not None:
            end_ids = np.array(sorted(id for id in job.stop_ids if id < vocab_size), np.int32)
            self._guides = BeamGuides(job.constraint, end_ids, beams.min_new_tokens)
            beams = replace(beams, min_new_tokens=0)  # the guides see to it
        self._state = BeamState(beams, job.stop_ids, job.max_new_tokens)
        self.candidates = candidates_needed(beams, job.stop_ids, vocab_size)  # of a beam, at most

    @property
    def is_guided(self) -> bool:
        return self._guides is not None

    @property
    def masks_take_long(self) -> bool:
        """`advance` is for another thread."""
        return self._masks_take_long

    @property
    def is_done(self) -> bool:
        return self._state.is_done

    @property
    def num_live(self) -> int:
        return 0 if self._state.is_done else self._state.num_live

    @property
    def length(self) -> int:
        """Tokens that each live beam has."""
        return self._state.length

    @property
    def last_tokens(self) -> Int32:  # [live]
        return self._state.last_tokens

    def mask(self, beam: int) -> Allowed | None:
        """What its next token may be; None: any."""
        return None if self._guides is None else self._guides.mask(beam)

    def counts(self, beams: Sequence[int]) -> Int32:
        """How many candidates each of the beams has."""
        if self._guides is None:
            return np.full(len(beams), self.candidates, np.int32)
        return self._guides.counts(beams, self.candidates)

    def advance(self, ids: Int32, logprobs: Float32) -> Int32:
        """Take the candidates of all live beams, [live, candidates], likeliest first; those with
        -inf are none. Returns the beam that each new one goes on from. Raises InvalidRequest where
        the constraint cannot be followed."""
        state, guides = self._state, self._guides
        if guides is None:
            return state.advance(ids, logprobs)
        is_last = state.length + 1 == self._max_new_tokens
        try:
            parents = state.advance(ids, logprobs, guides.accepts if is_last else None)
            if state.is_done:
                return parents
            going_on = guides.advance(parents, state.last_tokens, state.length)
        except ConstraintFault as fault:
            where = f"after {state.length} tokens of a beam"
            raise InvalidRequest("constraint", f"{where}: {fault}") from fault
        if not going_on.all():
            state.keep(going_on)
        return parents[going_on]

    def answer(self) -> list[SampleTokens]:
        """The best sequences, one for each that was asked for."""
        best = self._state.best
        news = [self._found(rank, found) for rank, found in enumerate(best)]
        return news + [_none_left(rank) for rank in range(len(best), self._spec.best)]

    @property
    def output_tokens(self) -> int:
        return self._state.best_tokens

    @property
    def lost_tokens(self) -> int:
        """That were generated, for beams that are not answered."""
        return max(0, self._state.searched_tokens - self.output_tokens)

    def _found(self, rank: int, found: Hypothesis) -> SampleTokens:
        # Under a constraint only whole outputs are found.
        cut = StopCause.COMPLETE if self.is_guided else StopCause.LENGTH
        return SampleTokens(
            rank,
            found.token_ids.tolist(),
            found.logprobs.tolist(),
            finish=StopCause.STOP_ID if found.has_end else cut,
            score=found.score,
        )


def _none_left(rank: int) -> SampleTokens:
    return SampleTokens(rank, (), (), finish=StopCause.NONE_LEFT, score=-math.inf)
