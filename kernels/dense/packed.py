"""All tables of a plan in one array, which goes to the device in one copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stemserve.kernels.dense.items import item_table
from stemserve.kernels.dense.plan import HostPlan
from stemserve.kernels.layout import Int32
from stemserve.kernels.strategy import Work

ALIGNMENT = 4  # entries: a table starts at a multiple


class Place(NamedTuple):
    """Of a table in the joined array."""

    start: int
    shape: tuple[int, ...]

    def host(self, joined: Int32) -> Int32:
        return joined[self.start : self.start + prod(self.shape)].reshape(self.shape)

    def device(self, joined: Tensor) -> Tensor:
        return self.flat(joined).view(self.shape)

    def flat(self, joined: Tensor) -> Tensor:
        """For who reads it by its address."""
        return joined.narrow(0, self.start, prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStage:
    items: Place  # [ctas, items, ITEM_FIELDS]
    blocks: Place  # [blocks, BLOCK_FIELDS]
    parts: Place  # [merged rows, most pieces]
    targets: Place  # [merged rows]


@dataclass(frozen=True, kw_only=True)
class PackedPlan:
    joined: Int32  # [entries] all tables, each from a multiple of ALIGNMENT on
    sources: Place  # [copied tokens]
    row_first: Place  # [rows]
    row_seen: Place  # [rows]
    stages: Sequence[PackedStage]
    partial_rows: int
    make_work: Callable[[], Work]

    @cached_property
    def work(self) -> Work:
        """Nobody waits for it before the step is launched."""
        return self.make_work()


def place_tables(shapes: Sequence[tuple[int, ...]]) -> list[Place]:
    """One after the other."""
    places: list[Place] = []
    start = 0
    for shape in shapes:
        places.append(Place(start, shape))
        start += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
    return places


def pack(host: HostPlan, query_heads: int, ctas: int) -> PackedPlan:
    arrays = [host.streams.sources, host.rows.first, host.rows.seen]
    for stage in host.stages:
        division = stage.division
        arrays += [item_table(division.tiles, query_heads, ctas), stage.blocks]
        arrays += [division.parts, division.targets]
    places = place_tables([array.shape for array in arrays])
    last = places[-1]
    joined = np.zeros(last.start + -(-prod(last.shape) // ALIGNMENT) * ALIGNMENT, np.int32)
    for place, array in zip(places, arrays, strict=True):
        place.host(joined)[...] = array
    sources, first, seen, *tables = places
    return PackedPlan(
        joined=joined,
        sources=sources,
        row_first=first,
        row_seen=seen,
        stages=[
            PackedStage(items=items, blocks=blocks, parts=parts, targets=targets)
            for items, blocks, parts, targets in zip(*[iter(tables)] * 4, strict=True)
        ],
        partial_rows=host.partial_rows,
        make_work=lambda: host.work,
    )
