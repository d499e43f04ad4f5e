"""Whole forests in one step: prefixes that are computed and read at once."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import CPU, VOCAB, make_runner, oracle_logprobs, save_tiny_model
from transformers import LlamaForCausalLM

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.strategy import Kernel
from stemserve.worker.blobs import decode_float32

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlamaForCausalLM:
    return save_tiny_model(folder, seed=12)


@dataclass(frozen=True, kw_only=True)
class Forest:
    """A forest computed in one step, each node by a segment of its own, and items below it."""

    plan: PlanBuilder
    sequences: list[list[int]]  # one a gather: the tokens up to the row that is read


def random_forest(seed: int) -> Forest:
    rng = np.random.default_rng(seed)
    plan = PlanBuilder()
    chains: list[list[int]] = []  # tokens from the root to the end of each node
    sequences: list[list[int]] = []
    path: list[int] = []
    next_page = 0
    shape: list[int] = rng.integers(0, 3, 8).tolist()  # how far to climb before each node
    for number, climb in enumerate(shape):
        path = path[: max(0, len(path) - climb)]
        parent = path[-1] if path else -1
        is_leaf = number + 1 == len(shape) or shape[number + 1] > 0
        size = int(rng.integers(1, 10)) if is_leaf else 4 * int(rng.integers(1, 3))
        own: list[int] = rng.integers(0, VOCAB, size).tolist()
        pages: list[int] = rng.permutation(range(next_page, next_page - (-size // 4))).tolist()
        next_page += len(pages)
        path.append(plan.node(size, pages, parent))
        chains.append((chains[parent] if parent >= 0 else []) + own)
        plan.gather(plan.prefill(path[-1], own) + size - 1, range(VOCAB))
        sequences.append(chains[-1])
    for node in map(int, rng.integers(-1, len(chains), 6)):
        item: list[int] = rng.integers(0, VOCAB, int(rng.integers(1, 7))).tolist()
        plan.gather(plan.item(node, item) + len(item) - 1, range(VOCAB))
        sequences.append((chains[node] if node >= 0 else []) + item)
    return Forest(plan=plan, sequences=sequences)


@pytest.mark.parametrize(
    "forced",
    [
        None,
        Kernel.NAIVE,
        Kernel.SPLIT,
        Kernel.RAGGED,
        Kernel.CASCADE,
        Kernel.MULTI_ITEM,
        Kernel.CUSTOM_MASK,
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_forest_computed_in_one_step_equals_one_sequence_at_a_time(
    folder: Path, oracle: LlamaForCausalLM, forced: Kernel | None, seed: int
) -> None:
    forest = random_forest(seed)
    tiny = make_runner(folder, forced=forced)
    tiny.pool.poison(np.arange(128, dtype=np.int32))
    result = tiny.runner.step(forest.plan.build())
    found = device_tensor(decode_float32("", result.gather_logprobs), CPU).view(-1, VOCAB)
    for row, sequence in zip(found, forest.sequences, strict=True):
        expected = oracle_logprobs(oracle, sequence)[-1]
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
