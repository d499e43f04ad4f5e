"""The host's part of cascade and split prefill by the dense kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stemserve.kernels.dense.items import Division, divide
from stemserve.kernels.dense.streams import Streams, streams
from stemserve.kernels.dense.tables import BLOCK_TOKENS
from stemserve.kernels.dense.tiles import (
    RowTables,
    TileTables,
    row_tables,
    steps,
    tile_tables,
)
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.strategy import Kernel, Part, Work

ENGINE = "dense"
GATHER = "gather"
MERGE = "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStage:
    division: Division
    blocks: Int32  # [blocks, BLOCK_FIELDS]
    tokens_read: int  # each run of tokens once for all tiles that share it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    streams: Streams
    rows: RowTables
    stages: list[HostStage]

    @property
    def partial_rows(self) -> int:
        """The stages follow each other: they may use the same."""
        return max((stage.division.partial_rows for stage in self.stages), default=0)

    @property
    def work(self) -> Work:
        stages = [
            (stage.division.tiles, stage.division.partial_rows, stage.tokens_read)
            for stage in self.stages
        ]
        return Work(parts=tuple(work_parts(len(self.streams.sources), stages)))


def work_parts(
    copied: int,  # tokens
    stages: Sequence[tuple[Int32, int, int]],  # tiles, partial rows and tokens read of each
) -> Iterator[Part]:
    if copied:
        yield Part(engine=GATHER, rows=int32([0]), kv_tokens=int32([copied]))
    for tiles, merged, tokens_read in stages:
        yield Part(
            engine=ENGINE,
            rows=tiles[:, 1],
            kv_tokens=int32(steps(tiles) * BLOCK_TOKENS),
            tokens_once=tokens_read,
        )
        if merged:
            yield Part(engine=MERGE, rows=int32([merged]), kv_tokens=int32([0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHost:
    """`cascade` packs rows of several segments that read the same into one tile, in one stage;
    `split` computes stored segments first and then the items, each by itself.
    """

    kernel: Kernel
    query_heads: int
    ctas: int

    def plan(self, layout: AttentionLayout) -> HostPlan:
        found = streams(layout)
        rows = row_tables(layout, found)
        stages = [
            self._stage(layout, tile_tables(layout, found, rows, segments, packed=self._packed))
            for segments in self._stages(layout)
            if layout.segment_rows[segments].any()
        ]
        return HostPlan(streams=found, rows=rows, stages=stages)

    @property
    def _packed(self) -> bool:
        return self.kernel is Kernel.CASCADE

    def _stage(self, layout: AttentionLayout, tables: TileTables) -> HostStage:
        return HostStage(
            division=divide(tables.tiles, layout.num_rows, self.query_heads, self.ctas),
            blocks=tables.blocks,
            tokens_read=tables.tokens_read,
        )

    def _stages(self, layout: AttentionLayout) -> list[Int32]:
        if self._packed:
            return [np.arange(layout.num_segments, dtype=np.int32)]
        is_item = layout.segment_is_item
        return [int32(np.flatnonzero(~is_item)), int32(np.flatnonzero(is_item))]
