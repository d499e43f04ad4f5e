"""What samples read, in the order of the samples, however the worker parted them."""

import random
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.worker.plans import LIMITS, PlanBuilder

from stemserve.worker.blobs import decode_float32, decode_int32
from stemserve.worker.result import LaunchedStep, RanStep
from stemserve.worker.sampling.sampler import Drawn
from stemserve.worker.scorer import Scores, plan_readout
from stemserve.worker.steps.step import Step, decode_step

MOST = 20


def sampling_step(samples: int) -> Step:
    """Each sample is drawn from a row of its own."""
    builder = PlanBuilder()
    first = builder.prefill(builder.node(samples, range(-(-samples // 4))), [7] * samples)
    for sample in range(samples):
        builder.sample(first + sample, sample)
    return decode_step(builder.build(), replace(LIMITS, sampler_slots=MOST))


def drawn(rng: np.random.Generator, counts: list[int], failed: list[bool], most: int) -> Drawn:
    rows = len(counts)
    return Drawn(
        tokens=torch.tensor(rng.integers(0, 50, rows)),
        logprobs=torch.tensor(rng.random(rows, np.float32)),
        failed=torch.tensor(failed, dtype=torch.bool),
        top_counts=np.array(counts, np.int32),
        top_ids=torch.tensor(rng.integers(0, 50, (rows, most))),
        top_logprobs=torch.tensor(rng.random((rows, most), np.float32)),
    )


def scores_of(draws: list[tuple[NDArray[np.intp], Drawn]]) -> Scores:
    none = torch.empty(0)
    return Scores(
        gather_logprobs=none,
        gather_argmax=none.long(),
        class_scores=none.view(0, 0),
        failed_gathered=none.bool(),
        failed_classified=none.bool(),
        draws=draws,
    )


@pytest.mark.parametrize("run", range(40))
def test_each_sample_is_answered_what_it_read(run: int) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(1, MOST))
    order = np.arange(samples) if rng.random() < 0.5 else rng.permutation(samples)
    cuts = sorted(rng.integers(0, samples + 1, int(rng.integers(0, 3))).tolist())
    parts = [order[a:b] for a, b in pairwise([0, *cuts, samples])]
    draws: list[tuple[NDArray[np.intp], Drawn]] = []
    ids: list[list[int]] = [[] for _ in range(samples)]
    logprobs: list[list[float]] = [[] for _ in range(samples)]
    failed: list[int] = []
    for part in parts:
        most = int(rng.integers(0, 5))
        whole = rng.random() < 0.5
        counts = [most if whole else int(rng.integers(0, most + 1)) for _ in part]
        fails: list[bool] = (rng.random(len(part)) < 0.1).tolist()
        found = drawn(rng, counts, fails, most)
        draws.append((part, found))
        for at, sample in enumerate(part.tolist()):
            ids[sample] = found.top_ids.numpy()[at, : counts[at]].tolist()
            logprobs[sample] = found.top_logprobs.numpy()[at, : counts[at]].tolist()
        failed += [sample for sample, fail in zip(part.tolist(), fails, strict=True) if fail]
    step = sampling_step(samples)
    ran = RanStep(step=step, readout=plan_readout(step), scores=scores_of(draws), groups=[])
    result = LaunchedStep(step=step, ran=[ran], started=0.0, span=None).result()
    if any(ids):
        indptr = [0, *accumulate(map(len, ids))]
        assert decode_int32("", result.top_indptr).tolist() == indptr
    else:
        assert not result.top_indptr
    assert decode_int32("", result.top_ids).tolist() == [*chain.from_iterable(ids)]
    assert decode_float32("", result.top_logprobs).tolist() == [*chain.from_iterable(logprobs)]
    assert decode_int32("", result.failed_rows).tolist() == sorted(failed)
