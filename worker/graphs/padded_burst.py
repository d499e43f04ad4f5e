"""A burst of decode steps (or one step) as a captured graph reads it: padded, in one buffer."""

from dataclasses import dataclass, replace

import numpy as np

from stemserve.kernels.codec.growth import Growth
from stemserve.kernels.codec.host_tables import Capacity, HostTables, section_starts
from stemserve.kernels.fused.burst import FIELDS, HEADER, BurstShape
from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.worker.graphs.padding import padded
from stemserve.worker.steps.step import Step

NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBurst:
    fields: Int32  # [4, steps, rows] token ids, positions, slots of keys and values, sample indexes
    sample_slots: Int32  # [rows]
    leaf_tokens: Int32  # [steps, rows] in the leaf of each row
    own_layout: AttentionLayout  # of the last sub-step, without padding
    layout: AttentionLayout  # with it

    @property
    def steps(self) -> int:
        return len(self.leaf_tokens)


def padded_burst(
    step: Step,  # each row is sampled once
    rows: int,
    *,
    spare_page: int,
    spare_slot: int,
) -> PaddedBurst:
    steps, own = step.repeat, step.num_rows
    sampled = np.argsort(step.samples.rows, kind="stable")  # the sample of each row
    slots, first_index = step.samples.slots[sampled], step.samples.index[sampled]
    ahead = np.zeros((1, own), np.int32)
    if steps > 1:
        ahead = np.minimum(np.arange(steps, dtype=np.int32)[:, None], step.row_steps - 1)
    fields = np.zeros((FIELDS, steps, rows), np.int32)
    token_ids, positions, kv_slots, index = fields
    token_ids[0, :own] = step.token_ids
    token_ids[1:, :own] = -1 - slots
    positions[:, :own] = step.positions + ahead
    kv_slots[:, own:] = -1
    kv_slots[:, :own] = step.kv_slots.reshape(steps, own)
    index[:, :own] = first_index + ahead
    sample_slots = np.full(rows, spare_slot, np.int32)
    sample_slots[:own] = slots
    tokens = np.ones((steps, rows), np.int32)
    layout = step.layout
    tokens[:, :own] = layout.node_tokens[layout.segment_node] + ahead
    if steps > 1:
        node_tokens = layout.node_tokens.copy()
        node_tokens[layout.segment_node] = tokens[-1, :own]
        layout = replace(layout, node_tokens=node_tokens)
    return PaddedBurst(
        fields=fields,
        sample_slots=sample_slots,
        leaf_tokens=tokens,
        own_layout=layout,
        layout=padded(layout, rows, spare_page),
    )


def idle_burst(rows: int, *, page_size: int, spare_page: int, spare_slot: int) -> PaddedBurst:
    """Padding and nothing else."""
    fields = np.zeros((FIELDS, 1, rows), np.int32)
    fields[2] = -1
    nobody = AttentionLayout(
        page_size=page_size,
        node_parent=NOTHING,
        node_page_indptr=np.zeros(1, np.int32),
        node_pages=NOTHING,
        node_tokens=NOTHING,
        segment_indptr=np.zeros(1, np.int32),
        segment_node=NOTHING,
        segment_is_item=np.zeros(0, np.bool_),
    )
    return PaddedBurst(
        fields=fields,
        sample_slots=np.full(rows, spare_slot, np.int32),
        leaf_tokens=np.ones((1, rows), np.int32),
        own_layout=nobody,
        layout=padded(nobody, rows, spare_page),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsShape:
    """Where the inputs of one number of rows are in their buffer."""

    burst: BurstShape
    tables: Capacity
    record: int  # entries of a piece's record in the tables

    @property
    def size(self) -> int:
        return self.burst.tables_at + section_starts(self.tables, self.record)[-1]

    def misfit(self, host: HostTables, growth: Growth) -> str | None:
        """What is too large for it; None: nothing is."""
        size = host.size
        for name in ("records", "pages", "columns", "partial_rows"):
            if getattr(size, name) > getattr(self.tables, name):
                return f"{getattr(size, name)} {name}; the graph has {getattr(self.tables, name)}"
        if len(growth.places) > self.burst.growth:
            return f"{len(growth.places)} entries grow; the graph has {self.burst.growth}"
        return None

    def pack(
        self, burst: PaddedBurst, host: HostTables, growth: Growth, flat: Int32
    ) -> tuple[slice, slice]:  # what was written
        """Numbers for the device, into [size]."""
        shape = self.burst
        entries = len(growth.places)
        flat[:3] = 0, entries, burst.steps - 1
        area = flat[HEADER : shape.slots_at].reshape(FIELDS, shape.steps, shape.rows)
        area[:, : burst.steps] = burst.fields
        flat[shape.slots_at : shape.places_at] = burst.sample_slots
        flat[shape.places_at : shape.places_at + entries] = growth.places
        values_end = shape.values_at + growth.values.size
        flat[shape.values_at : values_end] = growth.values.ravel()
        host.sections.pack(self.tables, flat[shape.tables_at :])
        words, masks = section_starts(self.tables, self.record)[6:8]
        pages = host.size.pages
        return (
            slice(0, shape.tables_at + words + pages),
            slice(shape.tables_at + masks, shape.tables_at + masks + pages),
        )
