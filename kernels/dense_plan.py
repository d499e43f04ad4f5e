"""The host's part of cascade and split prefill by the dense kernel."""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.dense_streams import Streams, streams
from stemserve.kernels.dense_tiles import RowTables, TileTables, row_tables, tile_tables
from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.strategy import Kernel, Part, Work

ENGINE = "dense"
GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    streams: Streams
    rows: RowTables
    stages: list[TileTables]

    @property
    def work(self) -> Work:
        parts = [
            Part(
                engine=ENGINE,
                rows=stage.tile_rows,
                kv_tokens=stage.tile_tokens,
                tokens_once=stage.tokens_read,
            )
            for stage in self.stages
        ]
        copied = int32([len(self.streams.sources)])
        if copied[0]:
            parts.insert(0, Part(engine=GATHER, rows=int32([0]), kv_tokens=copied))
        return Work(parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class DenseHost:
    """`cascade` packs rows of several segments that read the same into one tile, in one stage;
    `split` computes stored segments first and then the items, each by itself.
    """

    kernel: Kernel

    def plan(self, layout: AttentionLayout) -> HostPlan:
        found = streams(layout)
        rows = row_tables(layout, found)
        packed = self.kernel is Kernel.CASCADE
        stages = [
            tile_tables(layout, found, rows, segments, packed=packed)
            for segments in self._stages(layout)
            if layout.segment_rows[segments].any()
        ]
        return HostPlan(streams=found, rows=rows, stages=stages)

    def _stages(self, layout: AttentionLayout) -> list[Int32]:
        if self.kernel is Kernel.CASCADE:
            return [np.arange(layout.num_segments, dtype=np.int32)]
        is_item = layout.segment_is_item
        return [int32(np.flatnonzero(~is_item)), int32(np.flatnonzero(is_item))]
