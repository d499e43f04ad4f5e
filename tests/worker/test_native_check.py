"""What is found of a plan in C is what numpy finds, of right plans and of wrong ones."""

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.worker.plans import LIMITS, PlanBuilder

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan
from stemserve.worker.choice.shape_signature import signature
from stemserve.worker.steps.layout import candidates, group
from stemserve.worker.steps.native_check import (
    ARRAYS,
    ONE_TREE,
    READS_SLOTS,
    RIGHT,
    SLOTS_ASCEND,
    NativeCheck,
)
from stemserve.worker.steps.step import check_arrays, decode_step

SIZE = LIMITS.page_size
ODD_VALUES = (-(2**31), -2, -1, 0, 1, 3, 4, 7, 31, 32, 49, 50, 64, 2**31 - 1)
# Of all that there may be, the tests need plans of which many are right.
PLANS = 300


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh every run; a failing test shows it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def random_plan(rng: np.random.Generator) -> PlanBuilder:
    """Up to two trees of up to two levels, with segments of all kinds below any of the nodes."""
    plan = PlanBuilder()
    pages = rng.permutation(LIMITS.kv_pages).tolist()
    for _ in range(int(rng.integers(0, 3))):
        children = int(rng.integers(0, 3))
        full = int(rng.integers(1, 3))
        tokens = full * SIZE if children else int(rng.integers(1, full * SIZE + 1))
        root = plan.node(tokens, [pages.pop() for _ in range(-(-tokens // SIZE))])
        for _ in range(children):
            plan.node(int(rng.integers(1, SIZE + 1)), [pages.pop()], root)
    forced = int(rng.integers(0, 3))
    for _ in range(int(rng.integers(1, 6))):
        add_segment(rng, plan, forced if rng.random() < 0.9 else 0)
    rows = len(plan.token_ids)
    for row in rng.integers(0, rows, int(rng.integers(0, 4))).tolist():
        plan.gather(row, rng.integers(0, LIMITS.vocab_size, int(rng.integers(0, 3))).tolist())
    return plan


def add_segment(rng: np.random.Generator, plan: PlanBuilder, forced: int) -> None:
    nodes = len(plan.parents)
    node = int(rng.integers(-1, nodes))
    kind = rng.choice(["prefill", "item", "decode"], p=[0.45, 0.45, 0.1])
    rows = int(rng.integers(1, 6))
    low = -LIMITS.sampler_slots if rng.random() < 0.2 else 0
    tokens: list[int] = rng.integers(low, LIMITS.vocab_size, rows).tolist()
    if node < 0 or kind == "item":
        plan.item(node, tokens, kernel=forced)
    elif kind == "decode":
        plan.decode(node, tokens[0], kernel=forced)
    else:
        rows = min(rows, plan.chain_tokens(node))
        plan.prefill(node, tokens[:rows], stored=rng.random() < 0.8, kernel=forced)


def spoiled(rng: np.random.Generator, plan: worker_pb2.StepPlan) -> worker_pb2.StepPlan:
    """One number of one array is another, or one is missing, or one too many."""
    name = str(rng.choice(ARRAYS))
    values = np.frombuffer(getattr(plan, name), "<i4").copy()
    change = rng.random()
    if change < 0.8 and len(values):
        at = int(rng.integers(len(values)))
        near = int(values[at]) + int(rng.choice([-1, 1]))
        values[at] = near if rng.random() < 0.5 and abs(near) < 2**31 else rng.choice(ODD_VALUES)
    elif change < 0.9:
        values = values[:-1]
    else:
        values = np.append(values, np.int32(rng.choice(ODD_VALUES)))
    setattr(plan, name, values.astype("<i4").tobytes())
    return plan


def native(plan: worker_pb2.StepPlan) -> int:
    return NativeCheck(LIMITS)([getattr(plan, name) for name in ARRAYS])


def passes_in_numpy(plan: worker_pb2.StepPlan) -> bool:
    try:
        step = decode_step(plan, LIMITS)
        check_arrays(step, LIMITS)
    except BadPlan:
        return False
    return True


def test_what_is_built_is_right(rng: np.random.Generator) -> None:
    for _ in range(PLANS):
        plan = random_plan(rng).build()
        found, step = native(plan), None
        if not found & SLOTS_ASCEND and not passes_in_numpy(plan):
            continue  # two segments store the same token
        step = decode_step(plan, LIMITS)
        check_arrays(step, LIMITS)
        assert found & RIGHT
        assert bool(found & READS_SLOTS) == step.reads_slots == bool((step.token_ids < 0).any())


def test_a_number_that_is_off_is_found_as_in_numpy(rng: np.random.Generator) -> None:
    outcomes: set[bool] = set()
    for _ in range(4 * PLANS):
        plan = spoiled(rng, random_plan(rng).build())
        found, passes = native(plan), passes_in_numpy(plan)
        outcomes.add(passes)
        if found & RIGHT and not found & SLOTS_ASCEND:
            continue  # numpy looks whether they differ
        assert bool(found & RIGHT) == passes, plan
    assert outcomes == {True, False}


def test_steps_of_one_tree_have_the_groups_that_are_found_by_looking(
    rng: np.random.Generator,
) -> None:
    known = 0
    for _ in range(PLANS):
        plan = random_plan(rng).build()
        if not passes_in_numpy(plan):
            continue
        step = decode_step(plan, LIMITS)
        assert step.is_one_tree == bool(native(plan) & ONE_TREE)
        looked = replace(step, is_one_tree=False)
        one, other = list(candidates(step)), list(candidates(looked))
        assert [(c.phase, c.forced, c.segments.tolist()) for c in one] == [
            (c.phase, c.forced, c.segments.tolist()) for c in other
        ]
        known += step.is_one_tree
        for candidate, found in zip(one, other, strict=True):
            assert signature(step.layout, candidate) == signature(step.layout, found)
            mine = group(step, candidate.phase, candidate.segments)
            theirs = group(looked, found.phase, found.segments)
            assert np.array_equal(
                np.arange(step.num_rows)[mine.rows], np.arange(step.num_rows)[theirs.rows]
            )
            assert mine.layout.node_pages.tolist() == theirs.layout.node_pages.tolist()
            assert mine.layout.segment_node.tolist() == theirs.layout.segment_node.tolist()
    assert known
