"""What measured strategies took beside what the model of their engines said, between the shapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.pricing.engine_cost import Cost, CostTableError, Float64

FEATURES = 5

# A Gaussian process over the features: how far a measured ratio of times reaches, how large such
# ratios are, and how far one measurement is off (both natural logarithms). Chosen by leaving out
# one of 40 shapes on an H200 at a time.
REACH = np.array([4.0, 4.0, 4.0, 6.0, 2.5])
SPREAD = 0.2
NOISE = 0.05


@dataclass(frozen=True, kw_only=True)
class StrategyCorrection:
    """What the engines do not say."""

    host_seconds: float  # to launch, whatever the layout
    device: tuple[float | None, ...]  # [shapes] log of measured over modelled; None: not measured


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Of the strategies of one phase, over the features of some layouts."""

    shapes: tuple[tuple[float, ...], ...]  # [shapes][FEATURES]
    strategies: Mapping[str, StrategyCorrection]  # by `correction_key`

    def __post_init__(self) -> None:
        if any(len(features) != FEATURES for features in self.shapes):
            raise CostTableError(f"every shape of a correction must have {FEATURES} features")
        for name, found in self.strategies.items():
            if len(found.device) != len(self.shapes):
                raise CostTableError(f"the correction of {name} must have a value a shape")

    def corrected(self, key: str, features: Float64, cost: Cost) -> Cost:
        """A strategy that was not measured costs what its engines do."""
        if key not in self._processes:
            return cost
        ratio = math.exp(self._processes[key].at(features))
        return Cost(self.strategies[key].host_seconds, cost.device_seconds * ratio)

    @cached_property
    def _processes(self) -> dict[str, "_Process"]:
        processes: dict[str, _Process] = {}
        for name, found in self.strategies.items():
            measured = [i for i, value in enumerate(found.device) if value is not None]
            if measured:
                shapes = np.array([self.shapes[i] for i in measured], np.float64)
                ratios = np.array([found.device[i] for i in measured], np.float64)
                processes[name] = _Process(shapes, ratios)
        return processes


class _Process:
    """Between measured shapes, and their mean far from all of them."""

    def __init__(self, shapes: Float64, ratios: Float64) -> None:  # [shapes, FEATURES], [shapes]
        self._places = shapes / REACH
        self._mean = float(ratios.mean())
        noisy = np.stack([self._near(place) for place in self._places])
        noisy += NOISE**2 * np.eye(len(shapes))
        solver: Any = np.linalg  # partly untyped
        self._weights: Float64 = solver.solve(noisy, ratios - self._mean)

    def at(self, features: Float64) -> float:
        return self._mean + float(self._near(features / REACH) @ self._weights)

    def _near(self, place: Float64) -> Float64:  # [shapes]
        """Covariance with each of the shapes. Exponential: times over sizes have steps."""
        apart = self._places - place
        distance = np.sqrt(np.einsum("ij,ij->i", apart, apart))
        near: Float64 = SPREAD**2 * np.exp(-distance)
        return near


def layout_features(layout: AttentionLayout) -> Float64:  # [FEATURES]
    """What costs vary with.

    In log2: the segments that answer (the items, if there are any), their mean rows and mean chain,
    and how often they read a stored token. From 0 to 1: the stored tokens that are rows of the
    step.
    """
    rows, items = layout.segment_rows, layout.segment_is_item
    answers = items if items.any() else np.ones(len(rows), np.bool_)
    number = max(1, int(answers.sum()))
    own_rows = int(rows[answers].sum())
    chains = int(layout.chain_tokens[answers].sum(dtype=np.int64))
    stored = max(1, int(layout.node_tokens.sum(dtype=np.int64)))
    computed = int(rows[~items].sum())
    sizes = np.array([number, own_rows / number, chains / number, max(1.0, chains / stored)])
    return np.append(np.log2(np.maximum(sizes, 0.5)), min(1.0, computed / stored))
