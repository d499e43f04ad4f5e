"""Random numbers that depend on a seed and a position only, never on what was drawn before.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the
seed, the counter the position.
"""

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
BITS = 48  # few enough that u * total stays below total in float64


def philox(counter: UInt64, key: UInt64) -> UInt64:
    """[n, 4] and [n, 2] words of 32 bits to [n, 4] words."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> HALF) ^ c1 ^ k0,
            second & LOW,
            (first >> HALF) ^ c3 ^ k1,
            first & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(
    seeds: UInt64,  # [n]
    positions: UInt64,  # [n]
) -> NDArray[np.float64]:  # [n] in [0, 1)
    zeros = np.zeros_like(positions)
    counter = np.stack([positions & LOW, positions >> HALF, zeros, zeros], axis=1)
    words = philox(counter, np.stack([seeds & LOW, seeds >> HALF], axis=1))
    bits = ((words[:, 0] << HALF) | words[:, 1]) >> np.uint64(64 - BITS)
    return bits.astype(np.float64) / 2.0**BITS
