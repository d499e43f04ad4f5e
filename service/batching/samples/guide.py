"""What one sample may draw next, under a constraint."""

from collections.abc import Callable
from functools import partial

import numpy as np

from stemserve.service.batching.mask_work import Aside
from stemserve.service.constraints.allowed import Allowed
from stemserve.service.constraints.constraint import Constraint, ConstraintFault
from stemserve.service.errors import InvalidRequest, RequestError
from stemserve.service.request import SamplerSpec

Start = Callable[[Callable[[], Allowed]], Aside[Allowed]]


class Guide:
    """A sample's state in its constraint. The next mask is known when the token before it is, or a
    little later where it is made beside the step loop."""

    def __init__(
        self,
        constraint: Constraint,
        spec: SamplerSpec,
        stop_ids: frozenset[int],  # that end a sample
        start: Start,
    ) -> None:
        """`start` has a mask made that takes long. Raises InvalidRequest where no token can be
        first."""
        self._state = constraint.start()
        self._spec = spec
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._start = start if constraint.masks_take_long else None
        self._awaited: Aside[Allowed] | None = None
        self._fault: RequestError | None = None
        try:
            self.mask = self._make(index=0)  # of the next token
        except ConstraintFault as fault:
            raise InvalidRequest("constraint", str(fault)) from fault
        if not len(self.mask):
            raise InvalidRequest("constraint", "leaves no token: what it allows first is banned")

    @property
    def fault(self) -> RequestError | None:
        """The sample cannot go on, and is not complete."""
        return self._fault

    @property
    def awaits_mask(self) -> bool:
        """The next mask is being made."""
        return self._awaited is not None

    def take(self, token: int, *, generated: int, is_last: bool) -> bool:
        """True: the output is complete, and nothing can follow. `generated`: tokens, this one too;
        `is_last`: there is no room for another one."""
        try:
            self._state.advance(token)
        except ConstraintFault as fault:
            return self._fail(generated, fault)
        if self._state.is_closed:
            return True
        if is_last:
            return False
        make = partial(self._make, generated)
        if self._start is None:
            return self._settle(generated, make)
        self._awaited = self._start(make)
        return False

    def collect(self, *, generated: int) -> bool:
        """Take the mask that was awaited, if it is there. Returns as `take`."""
        awaited = self._awaited
        if awaited is None or not awaited.is_done:
            return False
        self._awaited = None
        return self._settle(generated, awaited.take)

    def _settle(self, generated: int, find: Callable[[], Allowed]) -> bool:
        try:
            self.mask = find()
        except ConstraintFault as fault:
            return self._fail(generated, fault)
        if len(self.mask):
            return False
        if self._state.is_complete:
            return True
        self._fault = InvalidRequest(
            "constraint", f"leaves no token behind {generated}: what it allows is banned"
        )
        return False

    def _fail(self, generated: int, fault: ConstraintFault) -> bool:
        self._fault = InvalidRequest("constraint", f"after {generated} tokens: {fault}")
        return False

    def _make(self, index: int) -> Allowed:
        """May be empty. Raises ConstraintFault."""
        spec, allowed = self._spec, self._state.allowed()
        if len(spec.banned_ids):
            allowed = allowed.without(spec.banned_ids)
        if len(spec.allowed_ids):
            allowed = allowed.within(spec.allowed_ids)
        if index < spec.min_new_tokens:
            allowed = allowed.without(self._stop_ids)
        return allowed
