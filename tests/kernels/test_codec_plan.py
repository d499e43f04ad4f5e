"""CoDec's task division: coverage, limits, balance, reduction order."""

import numpy as np
import pytest
from tests.kernels.forests import Node, Segment, make_layout, random_layout

from stemserve.kernels.layout import int32
from stemserve.kernels.prefix_forest import PrefixForest, prefix_forest
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.torch_paths.codec_plan import (
    CodecLimits,
    TaskList,
    divide,
    longest_first,
    partial_starts,
    reduction_table,
    split_counts,
)

LIMITS = CodecLimits(workers=6, max_splits=8, min_split_tokens=16, tile_rows=3)


def random_forest(seed: int) -> PrefixForest:
    return prefix_forest(random_layout(np.random.default_rng(seed), page_size=16, decode=True))


def one_long_chain(tokens: int = 4000) -> PrefixForest:
    return prefix_forest(make_layout([Node(tokens=tokens)], [Segment()]))


@pytest.mark.parametrize("seed", range(20))
def test_tasks_cover_every_row_and_token_once(seed: int, costs: CostTable) -> None:
    forest = random_forest(seed)
    tasks = divide(forest, costs, LIMITS)
    for index, run in enumerate(forest.runs):
        covered = np.zeros((run.rows, run.tokens), np.int64)
        for task in np.flatnonzero(tasks.run == index):
            row = tasks.row_start[task] - run.row_start
            token = tasks.token_start[task]
            covered[row : row + tasks.rows[task], token : token + tasks.tokens[task]] += 1
        assert (covered == 1).all()


@pytest.mark.parametrize("seed", range(20))
def test_tasks_keep_the_limits(seed: int, costs: CostTable) -> None:
    tasks = divide(random_forest(seed), costs, LIMITS)
    assert (tasks.rows <= LIMITS.tile_rows).all()
    assert (tasks.tokens > 0).all()
    assert (tasks.token_start % LIMITS.align_tokens == 0).all()
    assert ((tasks.worker >= 0) & (tasks.worker < LIMITS.workers)).all()


def test_no_run_is_cut_into_more_parts_than_allowed(costs: CostTable) -> None:
    forest = one_long_chain()
    assert divide(forest, costs, LIMITS).num_tasks <= LIMITS.max_splits
    short_parts = CodecLimits(workers=64, max_splits=64, min_split_tokens=1000)
    assert divide(forest, costs, short_parts).num_tasks <= 4


def test_one_worker_divides_nothing(costs: CostTable) -> None:
    assert divide(one_long_chain(), costs, CodecLimits(workers=1)).num_tasks == 1


def test_the_last_node_is_divided_too(costs: CostTable) -> None:
    assert divide(one_long_chain(), costs, LIMITS).num_tasks > 1


@pytest.mark.parametrize("seed", range(10))
def test_a_run_is_cut_no_more_than_its_longest_part_needs(seed: int, costs: CostTable) -> None:
    """With one part fewer, some part would take longer than the longest of the division."""
    rng = np.random.default_rng(seed)
    rows, tokens = int32(rng.integers(1, 64, 12)), int32(rng.integers(1, 5000, 12))
    splits = split_counts(rows, tokens, costs, LIMITS)
    units = -(-tokens // LIMITS.align_tokens)

    def part_seconds(
        parts: np.ndarray[tuple[int], np.dtype[np.int32]],
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        longest = np.minimum(-(-units // parts) * LIMITS.align_tokens, tokens)
        whole = costs.block_seconds(rows, tokens) + costs.launch_seconds
        part = costs.block_seconds(rows, int32(longest)) + costs.launch_seconds
        return np.maximum(part, whole / parts)

    bound = part_seconds(splits).max()
    cut = splits > 1
    assert (part_seconds(int32(np.maximum(splits - 1, 1)))[cut] >= bound * 0.999).all()


@pytest.mark.parametrize("seed", range(10))
def test_no_worker_is_loaded_beyond_the_bound_of_longest_first(seed: int, costs: CostTable) -> None:
    tasks = divide(random_forest(seed), costs, LIMITS)
    if tasks.num_tasks:
        even = tasks.seconds.sum() / LIMITS.workers
        assert tasks.makespan_s <= even + tasks.seconds.max()


def test_division_balances_a_degenerate_tree(costs: CostTable) -> None:
    nodes = [Node(tokens=4096)]
    nodes += [Node(parent=0, tokens=64) for _ in range(7)]
    layout = make_layout(nodes, [Segment(node=node) for node in range(1, 8)])
    limits = CodecLimits(workers=8, min_split_tokens=64)
    tasks = divide(prefix_forest(layout), costs, limits)
    assert tasks.makespan_s <= 1.35 * tasks.seconds.sum() / limits.workers


def test_longest_first_takes_the_longest_first() -> None:
    worker = longest_first(np.array([1.0, 5.0, 2.0, 4.0, 3.0]), workers=2)
    loads = np.bincount(worker, [1.0, 5.0, 2.0, 4.0, 3.0])
    assert sorted(loads.tolist()) == [7.0, 8.0]


@pytest.mark.parametrize("seed", range(10))
def test_reduction_lists_the_parts_of_each_row_in_tree_order(seed: int, costs: CostTable) -> None:
    forest = random_forest(seed)
    tasks = divide(forest, costs, LIMITS)
    rows = len(forest.row_order)
    table = reduction_table(tasks, rows, padding=-1)
    starts = partial_starts(tasks)
    for row in range(rows):
        parts = [int(part) for part in table[:, row] if part >= 0]
        assert parts == expected_parts(tasks, starts.tolist(), row)


def expected_parts(tasks: TaskList, starts: list[int], row: int) -> list[int]:
    return [
        starts[task] + row - int(tasks.row_start[task])
        for task in range(tasks.num_tasks)
        if tasks.row_start[task] <= row < tasks.row_start[task] + tasks.rows[task]
    ]


def test_an_empty_forest_has_no_tasks(costs: CostTable) -> None:
    layout = make_layout([], [Segment(node=-1), Segment(node=-1)])
    tasks = divide(prefix_forest(layout), costs, LIMITS)
    assert tasks.num_tasks == 0
    assert tasks.makespan_s == 0.0


@pytest.mark.parametrize("field", ["workers", "max_splits", "tile_rows", "align_tokens"])
def test_limits_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="at least"):
        CodecLimits(**{"workers": 1, field: 0})
