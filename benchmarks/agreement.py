"""Refuse to report a speed for answers that differ."""

import numpy as np
from numpy.typing import ArrayLike

TOLERANCE = 1e-3  # of a log-probability: differences of tiny probabilities would hide


class Disagreement(Exception):
    """Two sides gave different answers: a ratio of their times would mean nothing."""


def largest_difference(ours: ArrayLike, peer: ArrayLike) -> float:
    ours, peer = np.asarray(ours, np.float64), np.asarray(peer, np.float64)
    if ours.shape != peer.shape:
        raise Disagreement(f"shapes {ours.shape} and {peer.shape} differ")
    return float(np.max(np.abs(ours - peer)))


def refuse_beyond_tolerance(name: str, difference: float) -> None:
    if not difference <= TOLERANCE:  # also NaN
        raise Disagreement(
            f"{name}: log-probabilities differ by {difference:.1e}, more than {TOLERANCE:.0e}"
        )
