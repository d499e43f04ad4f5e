"""Metrics of constraints: what was compiled or found, and what their masks take."""

from stemserve.service.metrics.instruments import Instruments
from stemserve.service.metrics.labels import COMPILE, CONSTRAINTS


class ConstraintMetrics:
    """Safe from any thread."""

    def __init__(self, make: Instruments) -> None:
        self._constraints = make.counter(
            "constraints", "Constraints looked up", kind=CONSTRAINTS, cache=("hit", "miss")
        )
        self._compile = make.histogram(
            "constraint_compile_seconds",
            "To compile a constraint, in its thread",
            COMPILE,
            kind=CONSTRAINTS,
            outcome=("compiled", "refused"),
        )
        self._masks = make.histogram(
            "constraint_mask_seconds",
            "To make the masks of all samples and beams of a step under constraints on text, in "
            "their thread",
            COMPILE,
        )

    def looked_up(self, kind: str, *, found: bool) -> None:
        self._constraints.labels(kind, "hit" if found else "miss").inc()

    def compiled(self, kind: str, outcome: str, seconds: float) -> None:
        self._compile.labels(kind, outcome).observe(seconds)

    def masks_made(self, seconds: float) -> None:
        self._masks.observe(seconds)
