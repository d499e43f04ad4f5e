"""The token sequences that the CPU benchmark uses: random ids, fresh for each repeat."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

# Past the special tokens, below the vocabulary's end; every id is as dear as any other.
FIRST_TOKEN_ID = 100
LAST_TOKEN_ID = 49_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWorkload:
    """Items of one length that continue one prefix, each read out at the same labels."""

    prefix: Int32  # [prefix_tokens]
    items: Int32  # [items, item_tokens]
    label_ids: tuple[int, ...]

    @property
    def sequences(self) -> Int32:  # [items, prefix_tokens + item_tokens]
        return np.hstack([np.tile(self.prefix, (len(self.items), 1)), self.items])


def random_tokens(rng: np.random.Generator, *shape: int) -> Int32:
    return rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, shape, dtype=np.int32)


def score_workload(
    rng: np.random.Generator, *, prefix_tokens: int, items: int, item_tokens: int
) -> ScoreWorkload:
    first, second = rng.choice(np.arange(FIRST_TOKEN_ID, LAST_TOKEN_ID), 2, replace=False)
    return ScoreWorkload(
        prefix=random_tokens(rng, prefix_tokens),
        items=random_tokens(rng, items, item_tokens),
        label_ids=(int(first), int(second)),
    )


def fresh_prefixes(rng: np.random.Generator, workload: ScoreWorkload) -> Iterator[ScoreWorkload]:
    """The same items below a prefix that nobody has seen, again and again."""
    while True:
        yield replace(workload, prefix=random_tokens(rng, len(workload.prefix)))


def fresh_items(rng: np.random.Generator, workload: ScoreWorkload) -> Iterator[ScoreWorkload]:
    """New items of the same size below the same prefix, again and again."""
    while True:
        yield replace(workload, items=random_tokens(rng, *workload.items.shape))
