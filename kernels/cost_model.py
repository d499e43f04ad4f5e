"""Predicted seconds of attention work, from a table measured on the device."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import HeadShape, Int32
from stemserve.kernels.strategy import Work

FORMAT_VERSION = 1
SHIPPED_TABLES = Path(__file__).parent / "costs"

Float64 = NDArray[np.float64]


class CostTableError(ValueError):
    """A cost table is not one that this version reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds of one attention call's block, by its query rows and the KV tokens that it reads.

    `C_est` of the CoDec paper is `block_seconds`: bilinear in the logarithms, and along the last
    slope outside the grid. A table for other heads is `scaled`, in proportion to query heads *
    head_dim: that is the arithmetic, and the bytes too where the group stays the same. It is an
    estimate; calibrate to have the heads measured.
    """

    format_version: int
    device: str
    dtype: str
    query_heads: int
    kv_heads: int
    head_dim: int
    libraries: Mapping[str, str]  # name -> version of what was measured
    threads: int = 1  # of a CPU
    launch_seconds: float  # of a call, beside its blocks
    rows: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]  # [rows][kv_tokens]

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise CostTableError(
                f"cost table has format {self.format_version}, this version reads {FORMAT_VERSION};"
                " run python -m stemserve.worker calibrate"
            )
        if self.query_heads < 1 or self.kv_heads < 1 or self.head_dim < 1:
            raise CostTableError("heads and head_dim of a cost table must be at least 1")
        if self.query_heads % self.kv_heads:
            raise CostTableError("query heads of a cost table must be a multiple of its KV heads")
        for name, grid in (("rows", self.rows), ("kv_tokens", self.kv_tokens)):
            if len(grid) < 2 or grid[0] < 1 or any(np.diff(grid) <= 0):
                raise CostTableError(f"{name} must be two or more ascending positive sizes: {grid}")
        table = [list(line) for line in self.seconds]
        if [len(line) for line in table] != [len(self.kv_tokens)] * len(self.rows):
            raise CostTableError("seconds must have a line a row count and a value a token count")
        values = np.array([*np.ravel(table), self.launch_seconds])
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CostTableError("every time in a cost table must be positive and finite")

    def block_seconds(self, rows: Int32 | int, kv_tokens: Int32 | int) -> Float64:
        """C_est, elementwise; 0 where there are no rows or no tokens."""
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

    def work_seconds(self, work: Work) -> float:
        blocks = self.block_seconds(work.rows, work.kv_tokens)
        return work.launches * self.launch_seconds + float(blocks.sum())

    def scaled(self, shape: HeadShape) -> "CostTable":
        """The table for other heads, blocks in proportion to query heads * head_dim."""
        ratio = shape.query_heads * shape.head_dim / (self.query_heads * self.head_dim)
        return replace(
            self,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            seconds=tuple(tuple(value * ratio for value in line) for line in self.seconds),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        try:
            loaded: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise CostTableError(f"cost table is not JSON: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(loaded, dict):
            raise CostTableError("cost table must be a JSON object")
        entries = cast(dict[str, Any], loaded)
        if entries.keys() != names:
            raise CostTableError(f"cost table must have exactly the entries {sorted(names)}")
        try:
            entries["seconds"] = tuple(tuple(float(v) for v in line) for line in entries["seconds"])
            entries["rows"] = tuple(int(n) for n in entries["rows"])
            entries["kv_tokens"] = tuple(int(n) for n in entries["kv_tokens"])
            return cls(**entries)
        except TypeError as error:
            raise CostTableError(f"cost table has a value of the wrong kind: {error}") from error


def load_cost_table(path: Path) -> CostTable:
    return CostTable.from_json(path.read_text())


def shipped_cost_table(device: str) -> CostTable | None:
    """The table that comes with this package for a device, or None if it has to be measured."""
    path = SHIPPED_TABLES / f"{device}.json"
    return load_cost_table(path) if path.is_file() else None


def _grid_cell(
    grid: tuple[int, ...], sizes: NDArray[np.integer]
) -> tuple[NDArray[np.intp], Float64]:
    """Cell of the grid for each size, and the place in it; outside the grid, of the edge cell."""
    log_grid = np.log(np.array(grid, np.float64))
    log_size = np.log(np.maximum(sizes, 1).astype(np.float64))
    cell = np.clip(np.searchsorted(log_grid, log_size, side="right") - 1, 0, len(grid) - 2)
    part: Float64 = (log_size - log_grid[cell]) / (log_grid[cell + 1] - log_grid[cell])
    return cell, part
