"""What a constraint is to the batcher: which tokens may come next, until the output is complete."""

from typing import Protocol, Self

from stemserve.service.constraints.allowed import Allowed


class ConstraintFault(Exception):
    """A constraint that cannot be followed further: the request is at fault, not the engine.

    Its message is for whoever makes an InvalidRequest of it.
    """


class ConstraintState(Protocol):
    """How far one sample has come. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """The output may end here."""
        ...

    @property
    def is_closed(self) -> bool:
        """It is complete, and nothing can follow."""
        ...

    def allowed(self) -> Allowed:
        """Tokens that may come next.

        The end-of-sequence ids are among them where the output is complete. Raises ConstraintFault.
        """
        ...

    def advance(self, token: int) -> None:
        """Take a token that was allowed. Raises ConstraintFault."""
        ...

    def fork(self) -> Self:
        """Another state that has come as far."""
        ...


class Constraint(Protocol):
    """Compiled; any number of samples may start from it, from any thread."""

    @property
    def num_bytes(self) -> int:
        """About what it holds in memory."""
        ...

    @property
    def masks_take_long(self) -> bool:
        """Milliseconds are possible, for any but the first: they are for another thread."""
        ...

    def start(self) -> ConstraintState: ...
