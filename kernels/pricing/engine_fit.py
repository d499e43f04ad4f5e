"""Fit the engines of a GPU to measured strategies: the tiles that explain the times best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from stemserve.kernels.pricing.engine_cost import Cost, Float64, Path, TileEngine
from stemserve.kernels.strategy import TORCH, Kernel, Phase, Work

SWEEPS = 2
MOST_FITTED = 900  # measurements; all of them correct the result
TILE_ROWS = (16, 32, 64, 128, 192)  # of one head, or of the query heads of a KV head together
TAILS = (0.0, 0.12, 0.25, 0.5, 1.0)
FIRST_TILE_TOKENS = 256.0
RIDGE = 1e-9  # where two columns are one
LEAST_SECONDS = 1e-13  # of a token, where no time depends on the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A strategy on a layout."""

    phase: Phase
    kernel: Kernel
    features: tuple[float, ...]
    work: Work
    cost: Cost


Heads = tuple[int, int, int]  # query heads, KV heads, head_dim


def default_engine(query_heads: int, head_dim: int, processors: int) -> TileEngine:
    """About an H200's speed, before anything is measured: to leave out what is hopeless."""
    return TileEngine(
        host_seconds=30e-6,
        launch_seconds=3e-6,
        tile_rows=64,
        lanes=query_heads,
        slots=processors,
        splits=True,
        tile_tokens=FIRST_TILE_TOKENS,
        token_seconds=64 * 4 * head_dim * processors / 500e12,
    )


def fit_engines(
    measured: Sequence[Measurement], heads: Heads, processors: int
) -> dict[str, TileEngine]:
    """Every engine but torch that the measured work names."""
    some = measured[:: -(-len(measured) // MOST_FITTED)]
    fit = _Fit(some, default_engine(heads[0], heads[2], processors))
    for _, name in product(range(SWEEPS), fit.engines):
        fit.improve(name, _tiles(fit.engines[name], heads, processors))
        fit.improve(name, (replace(fit.engines[name], tail=tail) for tail in TAILS))
    return fit.result()


class _Fit:
    """Seconds = launches * launch_seconds + rows * row_seconds + (tokens + tiles * tile_tokens) *
    token_seconds + splits * split_seconds + part_rows * part_seconds, summed over the engines.
    """

    def __init__(self, measured: Sequence[Measurement], start: TileEngine) -> None:
        names = sorted({part.engine for m in measured for part in m.work.parts} - {TORCH})
        self.engines = dict.fromkeys(names, start)
        self._measured = measured
        self._seconds = np.array([m.cost.device_seconds for m in measured])
        self._launches = np.array([[_launches(m.work, name) for name in names] for m in measured])
        self._rows = np.array([[_rows(m.work, name) for name in names] for m in measured])
        self._paths = {name: self._path(name, start) for name in names}

    def improve(self, name: str, candidates: Iterator[TileEngine]) -> None:
        """Take the candidate with which all engines together fit best."""
        best = self._error(self._paths)
        for candidate in candidates:
            paths = self._paths | {name: self._path(name, candidate)}
            error = self._error(paths)
            if error < best:
                best, self._paths, self.engines[name] = error, paths, candidate

    def result(self) -> dict[str, TileEngine]:
        hosts = relative_fit(
            self._launches, np.array([m.cost.host_seconds for m in self._measured])
        )
        times = relative_fit(self._columns(self._paths), self._seconds)
        launch, rows, tokens, tiles, splits, parts = np.split(times, 6)
        token_s = np.maximum(tokens, LEAST_SECONDS)
        return {
            name: replace(
                engine,
                host_seconds=_rounded(hosts[i]),
                launch_seconds=_rounded(launch[i]),
                token_seconds=_rounded(token_s[i]),
                tile_tokens=_rounded(tiles[i] / token_s[i]),
                row_seconds=_rounded(rows[i]),
                split_seconds=_rounded(splits[i]),
                part_seconds=_rounded(parts[i]),
            )
            for i, (name, engine) in enumerate(self.engines.items())
        }

    def _path(self, name: str, engine: TileEngine) -> Float64:  # [measured, fields of Path]
        none = [Path(0.0, 0.0)]
        return np.array(
            [
                np.sum([engine.path(p) for p in m.work.parts if p.engine == name] or none, axis=0)
                for m in self._measured
            ],
            np.float64,
        )

    def _columns(self, paths: dict[str, Float64]) -> Float64:
        joined = np.stack(list(paths.values()), axis=-1)  # [measured, fields of Path, engines]
        fields = joined.reshape(len(self._measured), -1)
        return np.concatenate([self._launches, self._rows, fields], axis=1)

    def _error(self, paths: dict[str, Float64]) -> float:
        columns = self._columns(paths)
        modelled = columns @ relative_fit(columns, self._seconds)
        return float(np.mean(np.abs(np.log(np.maximum(modelled, 1e-9) / self._seconds))))


def _tiles(engine: TileEngine, heads: Heads, processors: int) -> Iterator[TileEngine]:
    """Two tiles may run on a processor at once: that matters where they are fewer."""
    query_heads, kv_heads, _ = heads
    for rows, (splits, slots) in product(TILE_ROWS, ((False, 1), (True, 1), (True, 2))):
        alike = replace(engine, splits=splits, slots=slots * processors)
        yield replace(alike, tile_rows=rows, lanes=query_heads)
        yield replace(alike, tile_rows=max(1, rows * kv_heads // query_heads), lanes=kv_heads)


def relative_fit(columns: Float64, seconds: Float64) -> Float64:  # [columns]
    """Least squares of the relative errors; no coefficient is negative."""
    scaled = columns / seconds[:, None]
    size = np.sqrt((scaled**2).sum(axis=0))
    used = np.flatnonzero(size > 0)
    scaled = scaled[:, used] / size[used]
    products, sums = scaled.T @ scaled + RIDGE * np.eye(len(used)), scaled.sum(axis=0)
    fitted, kept = np.zeros(columns.shape[1]), np.arange(len(used))
    solver: Any = np.linalg  # partly untyped
    while len(kept):
        found: Float64 = solver.solve(products[np.ix_(kept, kept)], sums[kept])
        if (found >= 0).all():
            fitted[used[kept]] = found / size[used[kept]]
            break
        kept = np.delete(kept, int(found.argmin()))
    return fitted


def _launches(work: Work, name: str) -> int:
    return sum(part.launches for part in work.parts if part.engine == name)


def _rows(work: Work, name: str) -> int:
    return sum(int(p.rows.sum(dtype=np.int64)) for p in work.parts if p.engine == name)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
