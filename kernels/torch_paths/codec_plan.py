"""Divide the attention of a prefix forest into tasks of balanced cost (CoDec's planner)."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32, int32
from stemserve.kernels.prefix_forest import PrefixForest
from stemserve.kernels.pricing.cost_model import Costs
from stemserve.kernels.pricing.engine_cost import Float64

BISECTION_STEPS = 24  # the makespan bound is then exact to 1e-7 of the total


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecLimits:
    workers: int  # tasks that the device runs at a time
    max_splits: int = 32  # parts of one run of tokens; more cost more in merges than they save
    min_split_tokens: int = 128
    tile_rows: int = 64  # rows of a task
    align_tokens: int = 16  # parts of a run start at multiples of it

    def __post_init__(self) -> None:
        if min(self.workers, self.max_splits, self.tile_rows, self.align_tokens) < 1:
            raise ValueError(f"limits of the task division must be at least 1: {self}")
        if self.min_split_tokens < self.align_tokens:
            raise ValueError(f"min_split_tokens must be at least align_tokens: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """Partial attention (PAC) tasks in tree order: parents first, then row tiles, then tokens."""

    run: Int32  # [tasks] run of the forest
    row_start: Int32  # [tasks] in the forest's order
    rows: Int32  # [tasks]
    token_start: Int32  # [tasks] inside the run
    tokens: Int32  # [tasks]
    seconds: Float64  # [tasks] predicted
    worker: Int32  # [tasks]

    @property
    def num_tasks(self) -> int:
        return len(self.run)

    @property
    def makespan_s(self) -> float:
        return float(np.bincount(self.worker, self.seconds).max(initial=0.0))


def divide(forest: PrefixForest, costs: Costs, limits: CodecLimits) -> TaskList:
    """Tasks that cover every (row, token) of the forest once."""
    run, row_start, rows = _row_tiles(forest, limits.tile_rows)
    tokens = int32([run.tokens for run in forest.runs])[run]
    splits = split_counts(rows, tokens, costs, limits)
    tile = np.repeat(np.arange(len(run)), splits)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)
    units = -(-tokens[tile] // limits.align_tokens)
    start = part * units // splits[tile] * limits.align_tokens
    stop = (part + 1) * units // splits[tile] * limits.align_tokens
    part_tokens = int32(np.minimum(stop, tokens[tile]) - start)
    seconds = costs.block_seconds(rows[tile], part_tokens) + costs.launch_seconds
    return TaskList(
        run=run[tile],
        row_start=row_start[tile],
        rows=rows[tile],
        token_start=int32(start),
        tokens=part_tokens,
        seconds=seconds,
        worker=longest_first(seconds, limits.workers),
    )


def split_counts(
    rows: Int32,  # [tiles]
    tokens: Int32,  # [tiles]
    costs: Costs,
    limits: CodecLimits,
) -> Int32:  # [tiles]
    """Parts of each tile, as few as keep every part under the least makespan that is possible.

    With all parts under a bound, no division takes less than (sum of costs) / workers; the bound
    is bisected until it meets that.
    """
    most = np.clip(tokens // limits.min_split_tokens, 1, limits.max_splits)
    counts = np.arange(1, int(most.max(initial=1)) + 1)
    units = -(-tokens // limits.align_tokens)
    longest = -(-units[:, None] // counts) * limits.align_tokens
    part_tokens = int32(np.minimum(longest, tokens[:, None]))
    seconds = costs.block_seconds(rows[:, None], part_tokens) + costs.launch_seconds
    # Parts together are never cheaper than the whole, whatever the noise of the table says.
    seconds = np.maximum(seconds, seconds[:, :1] / counts)
    seconds[counts > most[:, None]] = np.inf

    def fewest(bound: float) -> tuple[Int32, bool]:
        fits = seconds <= bound
        splits = np.where(fits.any(axis=1), fits.argmax(axis=1) + 1, most)
        spent = seconds[np.arange(len(splits)), splits - 1]
        feasible = fits.any(axis=1).all() and (splits * spent).sum() <= bound * limits.workers
        return int32(splits), bool(feasible)

    low, high = 0.0, float(seconds[:, 0].sum())
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fewest(middle)[1] else (middle, high)
    return fewest(high)[0]


def longest_first(
    seconds: Float64,  # [tasks]
    workers: int,
) -> Int32:  # [tasks] worker of each
    """Give each task, the longest first, to the worker that has the least to do."""
    worker = np.zeros(len(seconds), np.int32)
    loads = [(0.0, w) for w in range(workers)]
    for task in np.argsort(-seconds, kind="stable").tolist():
        load, least = heapq.heappop(loads)
        worker[task] = least
        heapq.heappush(loads, (load + float(seconds[task]), least))
    return worker


def reduction_table(
    tasks: TaskList,
    num_rows: int,
    padding: int,  # where rows with fewer parts than others find an empty one
) -> NDArray[np.int64]:  # [parts, rows]
    """For each row its partial results in tree order.

    Task t's results are the `rows[t]` partial rows after those of the tasks before it.
    """
    place = np.arange(int(tasks.rows.sum())) - np.repeat(partial_starts(tasks), tasks.rows)
    row = np.repeat(tasks.row_start, tasks.rows) + place
    counts = np.bincount(row, minlength=num_rows)
    order = np.argsort(row, kind="stable")
    part = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((int(counts.max(initial=0)), num_rows), padding, np.int64)
    table[part, row[order]] = order
    return table


def partial_starts(tasks: TaskList) -> Int32:  # [tasks]
    return int32(np.cumsum(tasks.rows) - tasks.rows)


def _row_tiles(forest: PrefixForest, tile_rows: int) -> tuple[Int32, Int32, Int32]:
    tiles = [
        (index, start, min(tile_rows, run.row_stop - start))
        for index, run in enumerate(forest.runs)
        for start in range(run.row_start, run.row_stop, tile_rows)
    ]
    columns = np.array(tiles, np.int32).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]
