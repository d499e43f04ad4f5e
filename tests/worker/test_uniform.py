"""Counter-based random numbers."""

import numpy as np
import pytest

from stemserve.worker.sampling.uniform import philox, uniform

ONES = 0xFFFFFFFF


# Known answers of philox4x32_10 in the authors' Random123 library.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    found = philox(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert [hex(w) for w in found[0]] == [hex(w) for w in words]


def test_a_number_depends_on_seed_and_position_only() -> None:
    rng = np.random.default_rng(5)
    seeds = rng.integers(0, 2**64, 50, np.uint64)
    positions = rng.integers(0, 2**31, 50).astype(np.uint64)
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


def test_neighbouring_seeds_and_positions_give_uniform_independent_numbers() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 900) ** 2 / 900).sum()
    assert chi_square < 148  # 99.9 % of 99 degrees of freedom
    for a, b in [(numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.012
