"""Fit the engines of a GPU to measured strategies: the tiles that explain the times best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from stemserve.kernels.engine_cost import Cost, Float64, TileEngine
from stemserve.kernels.strategy import TORCH, Kernel, Phase, Work

SWEEPS = 2
TILE_ROWS = (16, 32, 64, 128, 192)  # of one head, or of the query heads of a KV head together
TILE_TOKENS = (16.0, 64.0, 128.0, 256.0, 512.0)
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
        tile_tokens=TILE_TOKENS[1],
        token_seconds=64 * 4 * head_dim * processors / 500e12,
    )


def fit_engines(
    measured: Sequence[Measurement], heads: Heads, processors: int
) -> dict[str, TileEngine]:
    """Every engine but torch that the measured work names."""
    fit = _Fit(measured, default_engine(heads[0], heads[2], processors))
    for _, name in product(range(SWEEPS), fit.engines):
        fit.improve(name, _candidates(fit.engines[name], heads))
    return fit.result()


class _Fit:
    """Seconds = launches * launch_seconds + paths * token_seconds, each summed over the engines."""

    def __init__(self, measured: Sequence[Measurement], start: TileEngine) -> None:
        names = sorted({part.engine for m in measured for part in m.work.parts} - {TORCH})
        self.engines = dict.fromkeys(names, start)
        self._measured = measured
        self._seconds = np.array([m.cost.device_seconds for m in measured])
        self._launches = np.array([[_launches(m.work, name) for name in names] for m in measured])
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
        count = len(self.engines)
        return {
            name: replace(
                engine,
                host_seconds=float(hosts[i]),
                launch_seconds=float(times[i]),
                token_seconds=max(LEAST_SECONDS, float(times[count + i])),
            )
            for i, (name, engine) in enumerate(self.engines.items())
        }

    def _path(self, name: str, engine: TileEngine) -> Float64:
        return np.array(
            [
                sum(engine.path_tokens(part) for part in m.work.parts if part.engine == name)
                for m in self._measured
            ],
            np.float64,
        )

    def _columns(self, paths: dict[str, Float64]) -> Float64:
        return np.column_stack([self._launches, *paths.values()])

    def _error(self, paths: dict[str, Float64]) -> float:
        columns = self._columns(paths)
        modelled = columns @ relative_fit(columns, self._seconds)
        return float(np.mean(np.abs(np.log(np.maximum(modelled, 1e-9) / self._seconds))))


def _candidates(engine: TileEngine, heads: Heads) -> Iterator[TileEngine]:
    query_heads, kv_heads, _ = heads
    for rows, splits, tokens in product(TILE_ROWS, (False, True), TILE_TOKENS):
        alike = replace(engine, splits=splits, tile_tokens=tokens)
        yield replace(alike, tile_rows=rows, lanes=query_heads)
        yield replace(alike, tile_rows=max(1, rows * kv_heads // query_heads), lanes=kv_heads)


def relative_fit(columns: Float64, seconds: Float64) -> Float64:  # [columns]
    """Least squares of the relative errors; no coefficient is negative."""
    scaled = columns / seconds[:, None]
    size = np.maximum(np.abs(scaled).max(axis=0), 1e-30)
    used = np.flatnonzero(np.abs(columns).max(axis=0) > 0)
    fitted = np.zeros(columns.shape[1])
    while len(used):
        found = _least_squares(scaled[:, used] / size[used])
        if (found >= 0).all():
            fitted[used] = found / size[used]
            break
        used = np.delete(used, int(found.argmin()))
    return fitted


def _least_squares(columns: Float64) -> Float64:
    """Coefficients with which the columns add up to ones."""
    solved: Any = np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)  # partly untyped
    found: Float64 = solved[0]
    return found


def _launches(work: Work, name: str) -> int:
    return sum(part.launches for part in work.parts if part.engine == name)
