"""What a scoring mode asks the engine to read, and what it makes of the answer."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import Float32, Int32

NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """Units and gathers as in ScoreJob; a row is an item that can be scored."""

    units: PackedTokens
    unit_row: Int32  # [units]
    gather_unit: Int32
    gather_offset: Int32
    gather_indptr: Int32
    gather_ids: Int32
    classify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Readout:
    """The answer's arrays, for the rows."""

    scores: Float32  # [rows] or [rows, columns]
    label_mass: Float32 | None = None  # [rows]
    is_greedy: NDArray[np.bool_] | None = None  # [rows]
    token_logprobs: Float32 | None = None
    token_indptr: Int32 | None = None  # [rows + 1]


class Values(Protocol):
    """What the engine read of some rows, as in ScoreResult."""

    @property
    def gather_logprobs(self) -> Float32: ...
    @property
    def gather_argmax(self) -> Int32: ...
    @property
    def class_scores(self) -> Float32: ...


class Mode(Protocol):
    def read(self, values: Values) -> Readout: ...

    def take(self, rows: Int32) -> "Mode":
        """The mode for these rows alone."""
        ...
