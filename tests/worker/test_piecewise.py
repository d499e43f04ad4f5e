"""Steps by captured pieces, against the same steps launch by launch."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import VOCAB, TinyRunner, make_runner, save_tiny_model
from transformers import LlamaForCausalLM

from stemserve.kernels.layout import Int32
from stemserve.kernels.strategy import Kernel
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, decode_int32
from stemserve.worker.graphs.score_pieces import MOST_ROWS, piece_buckets
from stemserve.worker.steps.inputs import StepInputs

BUCKETS = (16, 32, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def seed() -> int:
    """Fresh every run; a failing test shows it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module", autouse=True)
def model(folder: Path) -> LlamaForCausalLM:
    return save_tiny_model(folder, seed=31)


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCAB, count).tolist()
    return tokens


def prompts(rng: np.random.Generator) -> PlanBuilder:
    """Two prompts, of which one is continued by items, and samples into slots 0 and 1."""
    plan = PlanBuilder()
    for slot, length in enumerate((int(rng.integers(1, 9)), 8)):
        node = plan.node(length, range(4 * slot, 4 * slot + -(-length // 4)))
        row = plan.prefill(node, random_tokens(rng, length)) + length - 1
        plan.samplers.append(worker_pb2.Sampler(slot=slot, seed=3))
        plan.sample(row, slot)
    for length in rng.integers(1, 6, 2).tolist():
        plan.gather(plan.item(1, random_tokens(rng, length)) + length - 1, [2, 5])
    return plan


def continuation(rng: np.random.Generator, first: PlanBuilder) -> PlanBuilder:
    """The samples decode beside a third prompt and items of the second one."""
    plan = PlanBuilder()
    lengths = first.tokens
    shared = plan.node(8, range(4, 6))
    tail = plan.node(1, [20], parent=shared)
    for length in rng.integers(1, 9, int(rng.integers(1, 5))).tolist():
        plan.gather(plan.item(shared, random_tokens(rng, length)) + length - 1, [1, 7])
    prompt = plan.node(11, range(12, 15))
    plan.gather(plan.prefill(prompt, random_tokens(rng, 11)) + 10, [4])
    plan.sample(plan.decode(tail, -2), 1, index=1)
    other = plan.node(lengths[0] + 1, range(-(-(lengths[0] + 1) // 4)))
    plan.sample(plan.decode(other, -1), 0, index=1)
    return plan


def run(tiny: TinyRunner, plans: list[PlanBuilder]) -> list[worker_pb2.StepResult]:
    return [tiny.runner.step(plan.build()) for plan in plans]


def assert_alike(found: worker_pb2.StepResult, expected: worker_pb2.StepResult) -> None:
    # A GPU's float32 products of another number of rows add in another order: 30 units in the last
    # place of a log-probability after three layers.
    for name in ("gather_logprobs", "sampled_logprobs"):
        np.testing.assert_allclose(
            decode_float32(name, getattr(found, name)),
            decode_float32(name, getattr(expected, name)),
            atol=1e-5,
            rtol=1e-5,
        )
    for name in ("gather_argmax", "sampled_tokens", "failed_rows"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forced", [None, *Kernel])
def test_mixed_steps_give_what_they_give_launch_by_launch(
    folder: Path, seed: int, forced: Kernel | None, device: str
) -> None:
    rng = np.random.default_rng(seed)
    first = prompts(rng)
    plans = [first, continuation(rng, first)]
    where = torch.device(device)
    expected = run(make_runner(folder, forced=forced, device=where), plans)
    found = run(make_runner(folder, forced=forced, device=where, buckets=BUCKETS), plans)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_neither_writes_pages_nor_enters_results(
    folder: Path, seed: int, device: str
) -> None:
    rng = np.random.default_rng(seed)
    plan = prompts(rng)
    where = torch.device(device)
    tiny = make_runner(folder, device=where, buckets=[64])
    big = PlanBuilder()
    big.gather(big.prefill(big.node(60, range(40, 55)), random_tokens(rng, 60)) + 59, [1])
    tiny.runner.step(big.build())  # leaves its rows in the buffers behind those of the next step
    tiny.pool.poison(np.arange(128, dtype=np.int32))
    result = tiny.runner.step(plan.build())
    assert_alike(result, make_runner(folder, device=where).runner.step(plan.build()))
    written = np.zeros(128 * 4, np.bool_)
    slots = np.asarray(plan.kv_slots)
    written[slots[slots >= 0]] = True
    for layer in range(3):
        for pages in (tiny.pool.k_pages(layer), tiny.pool.v_pages(layer)):
            finite = pages.isfinite().flatten(2).all(-1).flatten().cpu().numpy()
            assert finite[: len(written)].tolist() == written.tolist()  # and a spare page


def test_a_step_above_the_largest_bucket_runs_without_pieces(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = PlanBuilder()
    plan.gather(plan.prefill(plan.node(70, range(18)), random_tokens(rng, 70)) + 69, [3, 4])
    found = make_runner(folder, buckets=BUCKETS).runner.step(plan.build())
    assert_alike(found, make_runner(folder).runner.step(plan.build()))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_those_of_a_step_are_not_stored(seed: int, device: str) -> None:
    rng = np.random.default_rng(seed)
    inputs = StepInputs(64, 5, torch.device(device))

    def numbers(rows: int) -> tuple[Int32, Int32, Int32]:
        drawn = rng.integers(0, 1 << 20, (3, rows)).astype(np.int32)
        return drawn[0], drawn[1], drawn[2]

    for rows, padded in ((64, 64), (3, 16), (16, 16), (1, 32)):
        arrays = numbers(rows)
        found = inputs.put(*arrays, padded)
        for tensor, array in zip(
            (found.token_ids, found.positions, found.slots), arrays, strict=True
        ):
            assert len(tensor) == padded
            assert np.array_equal(tensor[:rows].cpu().numpy(), array)
        assert (found.slots[rows:] == -1).all()
        assert not found.positions[rows:].any()
        assert not inputs.head.any()
        assert found.slots.data_ptr() == inputs.fixed(padded).slots.data_ptr()


@pytest.mark.gpu
def test_later_arrays_do_not_reach_earlier_steps(seed: int) -> None:
    """The device sleeps while the host is steps ahead."""
    rng = np.random.default_rng(seed)
    inputs = StepInputs(1 << 16, 0, torch.device("cuda"))
    arrays = rng.integers(0, 99, (12, 3, 1 << 16)).astype(np.int32)
    torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]
    kept = [inputs.put(a[0], a[1], a[2], 1 << 16).positions.clone() for a in arrays]
    for found, expected in zip(kept, arrays, strict=True):
        assert np.array_equal(found.cpu().numpy(), expected[1])


@pytest.mark.parametrize("most", [1, 32, 100, 1024, 4096, 1 << 20])
def test_buckets_waste_little(most: int) -> None:
    buckets = piece_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == min(most, MOST_ROWS)
    for below, bucket in pairwise([0, *buckets]):
        assert bucket - below <= max(64, bucket // 8)


def test_a_row_may_name_the_token_that_was_drawn_last(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = prompts(rng)
    plan = continuation(rng, first)
    tiny, other = make_runner(folder, buckets=BUCKETS), make_runner(folder)
    drawn = decode_int32("", tiny.runner.step(first.build()).sampled_tokens)
    found = tiny.runner.step(plan.build())
    plan.token_ids = [int(drawn[-1 - token]) if token < 0 else token for token in plan.token_ids]
    other.runner.step(first.build())
    assert_alike(found, other.runner.step(plan.build()))


def labels_only(rng: np.random.Generator, items: int, ids: int) -> PlanBuilder:
    """Items over a prompt, read at their last rows, some at one row twice."""
    plan = PlanBuilder()
    length = int(rng.integers(1, 20))
    node = plan.node(length, range(-(-length // 4)))
    plan.prefill(node, random_tokens(rng, length))
    for _ in range(items):
        item = random_tokens(rng, int(rng.integers(1, 3)))
        row = plan.item(node, item) + len(item) - 1
        for _ in range(int(rng.integers(1, 3))):
            plan.gather(row, random_tokens(rng, ids))
    return plan


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("items", "ids"), [(1, 1), (3, 40), (7, 2), (15, 9), (30, 3)])
def test_what_a_step_gathers_in_one_graph_is_what_it_gathers_without(
    folder: Path, seed: int, items: int, ids: int, device: str
) -> None:
    rng = np.random.default_rng(seed)
    plans = [labels_only(rng, items, ids), labels_only(rng, items, ids)]
    where = torch.device(device)
    expected = run(make_runner(folder, device=where), plans)
    found = run(make_runner(folder, device=where, buckets=[128]), plans)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other)


def test_rows_that_are_not_finite_fail_in_one_graph_too(folder: Path, seed: int) -> None:
    tiny = make_runner(folder, buckets=[64])
    plan = labels_only(np.random.default_rng(seed), 3, 2)
    tiny.pool.poison(np.arange(128, dtype=np.int32))
    reading = PlanBuilder()
    node = reading.node(4, [100])
    bad = reading.item(node, [1, 2]) + 1
    reading.gather(bad, [3])
    good = reading.prefill(reading.node(3, [2]), [4, 5, 6]) + 2
    reading.gather(good, [3])
    assert not tiny.runner.step(plan.build()).failed_rows
    failed = decode_int32("", tiny.runner.step(reading.build()).failed_rows)
    assert failed.tolist() == [bad]
