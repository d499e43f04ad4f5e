"""The likeliest tokens of rows, against a sort in numpy."""

import numpy as np
import pytest
import torch

from stemserve.kernels.host_array import device_tensor
from stemserve.worker.sampling.truncation import largest

CPU = torch.device("cpu")


@pytest.mark.parametrize("kinds", [1, 2, 5, 1000])
@pytest.mark.parametrize("seed", range(10))
def test_of_equal_values_the_lowest_ids_are_the_largest(seed: int, kinds: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(1, 300))
    choices = np.append(rng.normal(0, 3, kinds), [0.0, -0.0]).astype(np.float32)
    values = rng.choice(choices, (7, vocab))
    count = int(rng.integers(1, vocab + 1))
    ids, found = largest(device_tensor(values, CPU), count)
    wanted = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids.numpy(), wanted)
    np.testing.assert_array_equal(found.numpy(), np.take_along_axis(values, wanted, -1))


@pytest.mark.parametrize("seed", range(10))
def test_what_cannot_be_is_behind_all_that_can(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice([1.0, 2.0, -np.inf], (5, 40), p=[0.1, 0.1, 0.8]).astype(np.float32)
    ids, found = largest(device_tensor(values, CPU), 20)
    for row in range(5):
        possible = int(np.isfinite(values[row]).sum())
        wanted = np.argsort(-values[row], kind="stable")[: min(20, possible)]
        assert ids.numpy()[row, : len(wanted)].tolist() == wanted.tolist()
        assert not np.isfinite(found.numpy()[row, len(wanted) :]).any()
        assert len(set(ids.numpy()[row].tolist())) == 20


def test_none_are_asked_for() -> None:
    ids, found = largest(torch.zeros(3, 9), 0)
    assert ids.shape == found.shape == (3, 0)
