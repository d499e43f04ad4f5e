"""Score on the CPU: a cold call against one padded batch, warm calls against a copied cache."""

import time
from collections.abc import Callable

import numpy as np
from in_process import InProcessRunner
from interleave import Comparison, Side
from numpy.typing import NDArray
from peer_transformers import TransformersPeer
from served import Served
from workloads import ScoreWorkload, fresh_items, fresh_prefixes, score_workload

OURS = "stemserve"
PADDED = "transformers, padded batch"
COPIED = "transformers, copied cache"
COPY_COUNTED = "transformers, copied cache, copying counted"
PREALLOCATED = "transformers, preallocated cache"
IN_PROCESS = "in-process forward"

PREFIX_TOKENS = 1024
ITEMS = 16
ITEM_TOKENS = 32


def cold_prefix(
    served: Served, peer: TransformersPeer, rng: np.random.Generator
) -> Comparison[ScoreWorkload]:
    """Every round has a prefix that neither side has seen."""

    def cold_call(work: ScoreWorkload) -> tuple[NDArray[np.float32], float]:
        scores, seconds = served.label_probabilities(work)
        _expect_computed(scores.usage.computed_tokens, work.prefix.size + work.items.size)
        return np.log(scores.scores), seconds

    return Comparison(
        title="Score, cold prefix",
        sides={OURS: cold_call, PADDED: _timed(peer.score_padded)},
        work=fresh_prefixes(rng, _workload(rng)),
    )


def warm_prefix(
    served: Served, peer: TransformersPeer, rng: np.random.Generator
) -> Comparison[ScoreWorkload]:
    """Both have the prefix's KV; every round has new items.

    The peer needs a cache as wide as the batch, which a call then grows or fills.
    """
    first = _workload(rng)
    cache = peer.prefill(first.prefix)

    def copied(work: ScoreWorkload) -> tuple[NDArray[np.float32], float]:
        wide = peer.repeated(cache, batch=ITEMS)
        return _timed(lambda same: peer.score_items(same, wide))(work)

    def preallocated(work: ScoreWorkload) -> tuple[NDArray[np.float32], float]:
        wide = peer.preallocated(cache, batch=ITEMS, room=ITEM_TOKENS)
        return _timed(lambda same: peer.score_items(same, wide))(work)

    copy_counted = _timed(lambda work: peer.score_items(work, peer.repeated(cache, batch=ITEMS)))
    return Comparison(
        title="Score, warm prefix",
        sides={
            OURS: _warm_call(served, first),
            COPIED: copied,
            COPY_COUNTED: copy_counted,
            PREALLOCATED: preallocated,
        },
        work=fresh_items(rng, first),
    )


def served_or_not(
    served: Served, runner: InProcessRunner, rng: np.random.Generator
) -> Comparison[ScoreWorkload]:
    """A warm call through gRPC, and the same step without a server."""
    first = _workload(rng)
    runner.make_resident(first.prefix)

    def forward(work: ScoreWorkload) -> tuple[NDArray[np.float32], float]:
        probabilities, seconds = runner.label_probabilities(work)
        return np.log(probabilities), seconds

    return Comparison(
        title="Score, warm prefix, served or not",
        sides={OURS: _warm_call(served, first), IN_PROCESS: forward},
        work=fresh_items(rng, first),
    )


def _workload(rng: np.random.Generator) -> ScoreWorkload:
    return score_workload(rng, prefix_tokens=PREFIX_TOKENS, items=ITEMS, item_tokens=ITEM_TOKENS)


def _warm_call(served: Served, first: ScoreWorkload) -> Side[ScoreWorkload]:
    context = served.register(first.prefix)

    def call(work: ScoreWorkload) -> tuple[NDArray[np.float32], float]:
        scores, seconds = served.label_probabilities(work, context)
        _expect_computed(scores.usage.computed_tokens, work.items.size)
        return np.log(scores.scores), seconds

    return call


def _timed(
    score: Callable[[ScoreWorkload], NDArray[np.float32]],
) -> Side[ScoreWorkload]:
    def side(work: ScoreWorkload) -> tuple[NDArray[np.float32], float]:
        started = time.perf_counter()
        probabilities = score(work)
        seconds = time.perf_counter() - started
        return np.log(probabilities), seconds

    return side


def _expect_computed(computed_tokens: int, wanted: int) -> None:
    if computed_tokens != wanted:
        raise RuntimeError(f"the server computed {computed_tokens} tokens where {wanted} are new")
