"""Plans in which two tiles share what they load: what partners agree on, and who is paired."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.kernels.codec_checks import DEVICE, ERROR, assert_close, expected, run_poisoned
from tests.kernels.codec_forests import layout_of, leaves_of, levels, random_kv
from tests.kernels.emulated_hopper import plan_of
from tests.kernels.test_codec_tiles import random_forest

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.native import NativePlanner
from stemserve.kernels.codec.pairs import (
    NEXT,
    OTHER_BASE,
    SHARED,
    STEPS,
    Pairing,
)
from stemserve.kernels.codec.planner import Planner, numpy_paired
from stemserve.kernels.layout import HeadShape


@pytest.mark.parametrize(
    "widths",
    [([1, 64], [8192, 256]), ([1, 50], [20000, 200]), ([1, 4, 16, 512], [1024, 256, 128, 32])],
    ids=str,
)
def test_partners_agree_on_what_they_share(widths: tuple[list[int], list[int]]) -> None:
    """And on how many stages each ring holds before."""
    nodes, bins = levels(*widths), 33
    host = plan_of(layout_of(nodes, leaves_of(nodes)), 4, bins)
    records = host.records
    words = host.streams.words.reshape(-1, 4)
    read = 0
    for first in range(0, bins - 1, 2):
        shares: list[list[tuple[int, ...]]] = []
        for head in (first, first + 1):
            base, at, found = 0, head, list[tuple[int, ...]]()
            while at >= 0:
                steps, start, shared = (int(n) for n in records[at, [STEPS, 3, SHARED]])
                if shared:
                    found.append((base, int(records[at, OTHER_BASE]), shared, start))
                base += steps - shared + (shared + 1) // 2
                read += steps
                at = int(records[at, NEXT])
            shares.append(found)
        assert len(shares[0]) == len(shares[1])
        for one, other in zip(*shares, strict=True):
            assert one[:2] == other[1::-1] and one[2] == other[2]
            of_one, of_other = (words[start : start + one[2]] for start in (one[3], other[3]))
            assert np.array_equal(of_one, of_other)
    assert not records[bins - 1, SHARED]
    assert read + int(records[bins - 1, STEPS]) == host.pieces.steps.sum()
    assert records[:, SHARED].any()


@pytest.mark.parametrize("seed", range(40))
def test_the_planner_in_c_pairs_bins_alike(seed: int) -> None:
    rng = np.random.default_rng([seed, 5])
    bins, group, wide = (
        int(rng.integers(1, 70)),
        int(rng.choice([1, 4, 7])),
        int(rng.choice([9, 48])),
    )
    nodes = levels([1, 8, int(rng.integers(20, 200))], [int(n) for n in rng.integers(0, 5000, 3)])
    if seed % 2:
        nodes = random_forest(rng, int(rng.integers(1, 200)))
    layout = layout_of(nodes, leaves_of(nodes))
    for pairing in (Pairing(wide=wide, least_steps=0), Pairing(wide=wide)):
        native = NativePlanner(group, bins, 0, PieceCosts(), Division(), pairing)
        expected = numpy_paired(layout, group, bins, PieceCosts(), Division(), pairing)
        for _ in range(2):  # the second time in the memory of the first
            found = native.plan(layout)
            assert found.paired == expected.paired and found.size == expected.size
            assert np.array_equal(found.records, expected.records)
            assert np.array_equal(found.pieces.steps, expected.pieces.steps)


@pytest.mark.parametrize(
    ("widths", "paired"),
    [
        (([1, 64], [8192, 256]), True),
        (([1, 16], [51200, 512]), True),
        (([32], [8192]), True),
        (([1, 64], [100, 60]), False),
        (([1, 8], [2048, 30]), False),
    ],
    ids=str,
)
def test_plans_of_short_pieces_are_made_for_the_triton_kernel(
    widths: tuple[list[int], list[int]], paired: bool
) -> None:
    nodes = levels(*widths)
    layout = layout_of(nodes, leaves_of(nodes))
    pairing, plain = (
        Planner(
            group=4, bins=33, window=0, costs=PieceCosts(), division=Division(), pairing=pairing
        ).plan(layout)
        for pairing in (Pairing(), None)
    )
    assert pairing.paired == paired and not plain.paired
    longest = np.bincount(pairing.pieces.bin, pairing.pieces.steps).max()
    assert (longest >= Pairing().least_steps) == paired
    assert np.array_equal(pairing.records, plain.records) or paired


@pytest.mark.parametrize("widths", [([1, 20], [700, 30]), ([1, 2, 4, 40], [300, 40, 16, 20])])
def test_the_triton_kernel_reads_paired_bins_too(widths: tuple[list[int], list[int]]) -> None:
    """Captured graphs of few rows have no other."""
    nodes = levels(*widths)
    layout = layout_of(nodes, leaves_of(nodes))
    shape = HeadShape(query_heads=4, kv_heads=1, head_dim=32, scale=32**-0.5)
    decode = CodecDecode(shape, DEVICE, DecodeNumbers(dtype=torch.float32), processors=4)
    decode.planner = Planner(
        group=4,
        bins=4,
        window=0,
        costs=PieceCosts(),
        division=Division(),
        pairing=Pairing(least_steps=0),
    )
    plan = decode.plan(layout)
    assert plan.on_hopper and plan.tables.host.records[:, SHARED].any()
    kv = random_kv(layout, shape, torch.float32, DEVICE)
    q = torch.randn((layout.num_rows, 4, 32), device=DEVICE)
    state = run_poisoned(decode, plan, q, kv)
    assert_close(state, expected(layout, q, kv, shape), ERROR[torch.float32])
