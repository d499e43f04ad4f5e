"""What the parts of a plan cost on one engine: a table of blocks, or a model of tiles on slots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import HeadShape, Int32
from stemserve.kernels.strategy import Part

Float64 = NDArray[np.float64]

SPLIT_TOKENS = 128  # of a tile, that are not divided further
EVEN = 1.05  # the longest tile over their mean, up to which tiles take whole waves


class CostTableError(ValueError):
    """A cost table is not one that this version reads."""


class Cost(NamedTuple):
    """Seconds of one layer. Launches follow each other closely, so host and device overlap."""

    host_seconds: float  # in which the host issues the launches
    device_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.host_seconds, self.device_seconds)

    def __add__(self, other: object) -> "Cost":
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(
            self.host_seconds + other.host_seconds, self.device_seconds + other.device_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEngine:
    """An engine whose blocks follow each other: seconds of a block by its rows and tokens.

    `C_est` of the CoDec paper is `block_seconds`: bilinear in the logarithms, and along the last
    slope outside the grid.
    """

    launch_seconds: float  # of a call, beside its blocks
    tile_rows: int  # rows of a causal block that are computed up to the last token they see
    rows: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]  # [rows][kv_tokens]

    def __post_init__(self) -> None:
        for name, grid in (("rows", self.rows), ("kv_tokens", self.kv_tokens)):
            if len(grid) < 2 or grid[0] < 1 or any(np.diff(grid) <= 0):
                raise CostTableError(f"{name} must be two or more ascending positive sizes: {grid}")
        if self.tile_rows < 1:
            raise CostTableError(f"tile_rows must be at least 1: {self.tile_rows}")
        table = [list(line) for line in self.seconds]
        if [len(line) for line in table] != [len(self.kv_tokens)] * len(self.rows):
            raise CostTableError("seconds must have a line a row count and a value a token count")
        require_positive([*np.ravel(table).tolist(), self.launch_seconds])

    def block_seconds(self, rows: Int32 | int, kv_tokens: Int32 | int) -> Float64:
        """C_est in seconds, elementwise; 0 where there are no rows or no tokens."""
        row, tokens = np.broadcast_arrays(np.asarray(rows), np.asarray(kv_tokens))
        log_seconds = np.log(np.array(self.seconds))
        low_row, row_part = _grid_cell(self.rows, row)
        low_token, token_part = _grid_cell(self.kv_tokens, tokens)
        corners = [
            log_seconds[low_row + i, low_token + j] * weight_i * weight_j
            for i, weight_i in ((0, 1 - row_part), (1, row_part))
            for j, weight_j in ((0, 1 - token_part), (1, token_part))
        ]
        estimate: Float64 = np.where((row > 0) & (tokens > 0), np.exp(np.sum(corners, axis=0)), 0.0)
        return estimate

    def cost(self, part: Part) -> Cost:
        seconds = self.block_seconds(part.rows, part.kv_tokens)
        if part.causal:
            whole = np.maximum(np.ceil(part.rows / self.tile_rows) * part.kv_tokens, 1)
            read = causal_tile_tokens(part.rows, part.kv_tokens, self.tile_rows)
            seconds = seconds * np.minimum(read / whole, 1)
        return Cost(part.launches * self.launch_seconds, float(seconds.sum()))

    def scaled(self, ratio: float) -> "BlockEngine":
        return BlockEngine(
            launch_seconds=self.launch_seconds,
            tile_rows=self.tile_rows,
            rows=self.rows,
            kv_tokens=self.kv_tokens,
            seconds=tuple(tuple(value * ratio for value in line) for line in self.seconds),
        )


class Path(NamedTuple):
    """What the busiest slot works through."""

    tokens: float
    tiles: float
    splits: float = 0.0  # 1: tiles were divided
    part_rows: float = 0.0  # rows, once each part that their tiles were divided into


@dataclass(frozen=True, slots=True, kw_only=True)
class TileEngine:
    """An engine whose blocks are cut into tiles of rows that run on the slots of a device at once.

    The time of a tile is `(kv_tokens + tile_tokens) * token_seconds`; that q is read and the result
    written, by all slots together, adds `row_seconds` a row. Tiles of equal length take
    whole waves; others end a share of a tile apart. Nothing ends before its longest tile, except
    where the engine divides the tokens of tiles that are fewer than its slots.
    """

    host_seconds: float  # of the host, to launch
    launch_seconds: float  # of the device, beside the tiles
    tile_rows: int  # query rows (tokens) of a tile
    lanes: int  # tiles for each of these: query heads, or KV heads where a group shares a tile
    slots: int  # tiles that run at once
    splits: bool  # the tokens of a tile are divided over slots that would be idle
    tail: float = 0.5  # of a mean tile: how far apart slots end
    tile_tokens: float  # what a tile costs beside its tokens, as so many of them
    token_seconds: float
    row_seconds: float = 0.0
    split_seconds: float = 0.0  # where tiles were divided: to launch the merge
    part_seconds: float = 0.0  # of a row of each part that is written and merged

    def __post_init__(self) -> None:
        if min(self.tile_rows, self.lanes, self.slots) < 1:
            raise CostTableError(f"tile_rows, lanes and slots must be at least 1: {self}")
        times = (self.host_seconds, self.launch_seconds, self.row_seconds, self.split_seconds)
        if min(*times, self.part_seconds, self.tile_tokens) < 0:
            raise CostTableError(f"times of an engine must not be negative: {self}")
        require_positive([self.token_seconds])

    def cost(self, part: Part) -> Cost:
        path = self.path(part)
        device = self.launch_seconds * part.launches
        device += self.row_seconds * int(part.rows.sum(dtype=np.int64))
        device += self.token_seconds * (path.tokens + path.tiles * self.tile_tokens)
        device += self.split_seconds * path.splits + self.part_seconds * path.part_rows
        return Cost(self.host_seconds * part.launches, device)

    def path(self, part: Part) -> "Path":
        tiles, tokens, longest = self._one(part) if len(part.rows) == 1 else self._many(part)
        number = tiles * self.lanes
        if not number:
            return Path(0.0, 0.0)
        if self.splits and number < self.slots:
            shared = max(tokens * self.lanes / self.slots, min(longest, SPLIT_TOKENS))
            if shared >= longest:
                return Path(longest, 1.0)
            parts = tokens / tiles / shared
            return Path(shared, 1.0, 1.0, parts * int(part.rows.sum(dtype=np.int64)))
        mean, waves = tokens / tiles, number / self.slots
        if longest + self.tile_tokens <= EVEN * (mean + self.tile_tokens):
            return Path(math.ceil(waves) * mean, float(math.ceil(waves)))
        waves += self.tail
        if longest + self.tile_tokens > waves * (mean + self.tile_tokens):
            return Path(longest, 1.0)
        return Path(waves * mean, waves)

    def _one(self, part: Part) -> tuple[int, float, float]:
        """Tiles of a lane, the tokens that they read, and the most that one reads."""
        rows, tokens = int(part.rows[0]), int(part.kv_tokens[0])
        tiles = -(-rows // self.tile_rows) if rows else int(tokens > 0)  # no rows: a copy
        if not part.causal:
            return tiles, float(tiles * tokens), float(tokens)
        read = causal_tile_tokens(np.array([rows]), np.array([tokens]), self.tile_rows)
        return tiles, float(read[0]), float(tokens)

    def _many(self, part: Part) -> tuple[int, float, float]:
        tiles = -(-part.rows // self.tile_rows)
        if not part.rows.all():
            tiles = np.maximum(tiles, (part.kv_tokens > 0) & (part.rows == 0))
        if part.causal:
            tokens = causal_tile_tokens(part.rows, part.kv_tokens, self.tile_rows).sum()
        else:
            tokens = tiles @ part.kv_tokens.astype(np.float64)
        return int(tiles.sum(dtype=np.int64)), float(tokens), float(part.kv_tokens.max(initial=0))

    def scaled(self, ratio: float) -> "TileEngine":
        """For so many times the query heads * head_dim."""
        return TileEngine(
            host_seconds=self.host_seconds,
            launch_seconds=self.launch_seconds,
            tile_rows=self.tile_rows,
            lanes=self.lanes,
            slots=self.slots,
            splits=self.splits,
            tail=self.tail,
            tile_tokens=self.tile_tokens,
            token_seconds=self.token_seconds * ratio,
            row_seconds=self.row_seconds * ratio,
            split_seconds=self.split_seconds,
            part_seconds=self.part_seconds * ratio,
        )


Engine = BlockEngine | TileEngine


def causal_tile_tokens(
    rows: Int32,  # [blocks]
    kv_tokens: Int32,  # [blocks]
    tile_rows: int,
) -> Float64:  # [blocks]
    """Sum of the tokens that the tiles of causal blocks read: each up to its last row's."""
    row, tokens = rows.astype(np.float64), kv_tokens.astype(np.float64)
    row = np.minimum(row, tokens)  # rows before these see nothing
    full = np.floor(row / tile_rows)
    ends = full * (tokens - row) + tile_rows * full * (full + 1) / 2
    read: Float64 = ends + np.where(row > full * tile_rows, tokens, 0)
    return read


def require_positive(values: Sequence[float]) -> None:
    found = np.array(values, np.float64)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise CostTableError("every time in a cost table must be positive and finite")


def scale_ratio(new: HeadShape, query_heads: int, head_dim: int) -> float:
    """Of work, from a table's heads to others: the arithmetic, and bytes if the group is equal."""
    return new.query_heads * new.head_dim / (query_heads * head_dim)


def _grid_cell(
    grid: tuple[int, ...], sizes: NDArray[np.integer]
) -> tuple[NDArray[np.intp], Float64]:
    """Cell of the grid for each size, and the place in it; outside the grid, of the edge cell."""
    log_grid = np.log(np.array(grid, np.float64))
    log_size = np.log(np.maximum(sizes, 1).astype(np.float64))
    cell = np.clip(np.searchsorted(log_grid, log_size, side="right") - 1, 0, len(grid) - 2)
    part: Float64 = (log_size - log_grid[cell]) / (log_grid[cell + 1] - log_grid[cell])
    return cell, part
