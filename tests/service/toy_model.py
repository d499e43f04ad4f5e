"""A model whose logits depend on the whole sequence: any wrong token, order or length shows."""

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import SamplerSpec

VOCAB = 13
CLASSES = 3
SEED = 7  # state of the empty sequence
MASK = (1 << 61) - 1
Float64 = NDArray[np.float64]


def extend(state: int, token: int) -> int:
    """State of a sequence with one more token: any change before it changes it."""
    return ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK


def logits_of(state: int, width: int = VOCAB) -> Float64:
    numbers = [extend(extend(state, 1000 + i), 17) >> 20 for i in range(width)]
    return np.array([number % 10_007 / 1_500 for number in numbers])


def logprobs_of(state: int) -> Float64:
    logits = logits_of(state)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    return logits


def draw(state: int, spec: SamplerSpec, index: int, allowed: bytes | None = None) -> int:
    """`allowed`: a bit a token; None: all are."""
    logits = logits_of(state)
    logits[spec.bias_ids] += spec.bias_values
    if allowed is not None:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
        logits[bits[:VOCAB] == 0] = -np.inf
    if spec.temperature <= 1e-5:
        return int(logits.argmax())
    noise = np.random.default_rng([spec.seed, index]).gumbel(size=VOCAB)
    return int((logits / spec.temperature + noise).argmax())


def state_of(tokens: list[int]) -> int:
    state = SEED
    for token in tokens:
        state = extend(state, token)
    return state
