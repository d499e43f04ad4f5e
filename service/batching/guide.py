"""What one sample may draw next, under a constraint."""

import numpy as np

from stemserve.service.constraints.allowed import Allowed, AllowedIds
from stemserve.service.constraints.constraint import Constraint, ConstraintFault
from stemserve.service.errors import InvalidRequest, RequestError
from stemserve.service.request import SamplerSpec


class Guide:
    """A sample's state in its constraint. The next mask is known when the token before it is."""

    def __init__(
        self,
        constraint: Constraint,
        spec: SamplerSpec,
        stop_ids: frozenset[int],  # that end a sample
    ) -> None:
        """Raises InvalidRequest where no token can be first."""
        self._state = constraint.start()
        self._spec = spec
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._fault: RequestError | None = None
        self.mask: Allowed = AllowedIds(np.zeros(0, np.int32))  # of the next token
        try:
            some = self._find_mask(index=0)
        except ConstraintFault as fault:
            raise InvalidRequest("constraint", str(fault)) from fault
        if not some:
            raise InvalidRequest("constraint", "leaves no token: what it allows first is banned")

    @property
    def fault(self) -> RequestError | None:
        """The sample cannot go on, and is not complete."""
        return self._fault

    def take(self, token: int, *, generated: int, is_last: bool) -> bool:
        """True: the output is complete, and nothing can follow. `generated`: tokens, this one too;
        `is_last`: there is no room for another one."""
        state = self._state
        try:
            state.advance(token)
            if state.is_closed:
                return True
            if is_last or self._find_mask(index=generated):
                return False
            if state.is_complete:
                return True
            self._fault = InvalidRequest(
                "constraint", f"leaves no token behind {generated}: what it allows is banned"
            )
        except ConstraintFault as fault:
            self._fault = InvalidRequest("constraint", f"after {generated} tokens: {fault}")
        return False

    def _find_mask(self, index: int) -> bool:
        """Whether there is a token."""
        spec, allowed = self._spec, self._state.allowed()
        if len(spec.banned_ids):
            allowed = allowed.without(spec.banned_ids)
        if len(spec.allowed_ids):
            allowed = allowed.within(spec.allowed_ids)
        if index < spec.min_new_tokens:
            allowed = allowed.without(self._stop_ids)
        self.mask = allowed
        return len(allowed) > 0
