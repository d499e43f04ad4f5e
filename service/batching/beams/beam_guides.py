"""What the beams of a search may go on with, under a constraint: each has its own state."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stemserve.service.constraints.allowed import Allowed, AllowedIds
from stemserve.service.constraints.constraint import Constraint, ConstraintFault, ConstraintState
from stemserve.service.errors import InvalidRequest
from stemserve.service.request import Int32


class BeamGuides:
    def __init__(self, constraint: Constraint, end_ids: Int32, min_new_tokens: int) -> None:
        """`end_ids` end a beam. Raises InvalidRequest where nothing can come first."""
        self._end_ids = end_ids
        self._min_new_tokens = min_new_tokens
        self._states = [constraint.start()]
        try:
            self._masks = [self._allowed(self._states[0], length=0)]
        except ConstraintFault as fault:
            raise InvalidRequest("constraint", str(fault)) from fault
        if not len(self._masks[0]):
            raise InvalidRequest("constraint", "leaves no first token")

    def mask(self, beam: int) -> Allowed:
        """Not empty."""
        return self._masks[beam]

    def counts(self, beams: Sequence[int], most: int) -> Int32:
        """How many candidates each offers, at most so many."""
        return np.array([min(most, len(self._masks[beam])) for beam in beams], np.int32)

    def accepts(self, beam: int, token: int) -> bool:
        """Whether the output is whole with this token, which was allowed, behind the beam."""
        state = self._states[beam].fork()
        state.advance(token)
        return state.is_complete

    def advance(self, parents: Int32, tokens: Int32, length: int) -> NDArray[np.bool_]:
        """Beam i goes on from parents[i] with tokens[i], and has `length` tokens then.

        Returns which can go on further; only those are kept. Raises ConstraintFault.
        """
        parent_of: list[int] = parents.tolist()
        token_of: list[int] = tokens.tolist()
        left = Counter(parent_of)
        states: list[ConstraintState] = []
        for parent, token in zip(parent_of, token_of, strict=True):
            left[parent] -= 1
            state = self._states[parent]
            if left[parent]:
                state = state.fork()
            state.advance(token)
            states.append(state)
        masks = [self._allowed(state, length) for state in states]
        alive = [bool(len(mask)) for mask in masks]
        self._states = [state for state, goes_on in zip(states, alive, strict=True) if goes_on]
        self._masks = [mask for mask in masks if len(mask)]
        return np.array(alive, np.bool_)

    def _allowed(self, state: ConstraintState, length: int) -> Allowed:
        if state.is_closed:  # the end comes before min_new_tokens, too
            return AllowedIds(self._end_ids)
        allowed = state.allowed()
        return allowed.without(self._end_ids) if length < self._min_new_tokens else allowed
