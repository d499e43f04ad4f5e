"""A constraint without a tokenizer: sequences of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stemserve.service.constraints.allowed import Allowed, allowed_ids
from stemserve.service.constraints.constraint import ConstraintFault


@dataclass(frozen=True)
class OneOf:
    """The output is one of some sequences, with an end behind it."""

    sequences: Sequence[Sequence[int]]
    vocab_size: int
    end_id: int

    num_bytes: int = 0
    masks_take_long: bool = False

    def start(self) -> "OneOfState":
        return OneOfState(self)


@dataclass
class OneOfState:
    whole: OneOf
    said: list[int] = field(default_factory=list[int])

    @property
    def is_complete(self) -> bool:
        return self.said in [list(each) for each in self.whole.sequences]

    @property
    def is_closed(self) -> bool:
        return self.is_complete and not self._next()

    def allowed(self) -> Allowed:
        ids = self._next()
        if self.is_complete:
            ids.add(self.whole.end_id)
        return allowed_ids(np.array(sorted(ids), np.int32), self.whole.vocab_size)

    def advance(self, token: int) -> None:
        if token not in self._next():
            raise ConstraintFault(f"token {token} was not allowed")
        self.said.append(token)

    def fork(self) -> "OneOfState":
        return OneOfState(self.whole, list(self.said))

    def _next(self) -> set[int]:
        said = len(self.said)
        going_on = [each for each in self.whole.sequences if list(each[:said]) == self.said]
        return {each[said] for each in going_on if len(each) > said}
