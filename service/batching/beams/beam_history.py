"""The tokens of a search's beams: of each step those that came, and the beams they came behind.

A step adds to it and copies nothing, however long the beams are; a sequence is read back from its
last token.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import Float32, Int32


class _Step(NamedTuple):
    parents: NDArray[np.intp]  # [live] the beam before
    tokens: Int32  # [live]
    logprobs: Float32  # [live]


class BeamHistory:
    def __init__(self) -> None:
        self._steps: list[_Step] = []

    @property
    def last_tokens(self) -> Int32:  # [live]
        return self._steps[-1].tokens

    def add(self, parents: NDArray[np.intp], tokens: Int32, logprobs: Float32) -> None:
        """Beam i goes on from parents[i]."""
        self._steps.append(_Step(parents, tokens, logprobs))

    def keep(self, going_on: NDArray[np.bool_]) -> None:
        """Of the live beams, the others are given up."""
        parents, tokens, logprobs = self._steps[-1]
        self._steps[-1] = _Step(parents[going_on], tokens[going_on], logprobs[going_on])

    def sequences(self, beams: Int32, lengths: Int32) -> list[tuple[Int32, Float32]]:
        """Tokens and log-probabilities of beams[i] when it had lengths[i] tokens."""
        longest = int(lengths.max(initial=0))
        tokens: Int32 = np.zeros((len(beams), longest), np.int32)
        logprobs: Float32 = np.zeros((len(beams), longest), np.float32)
        at = beams.astype(np.intp)
        for length in range(longest, 0, -1):
            step, reached = self._steps[length - 1], np.flatnonzero(lengths >= length)
            tokens[reached, length - 1] = step.tokens[at[reached]]
            logprobs[reached, length - 1] = step.logprobs[at[reached]]
            at[reached] = step.parents[at[reached]]
        ends: list[int] = lengths.tolist()
        return [(tokens[i, :end], logprobs[i, :end]) for i, end in enumerate(ends)]
