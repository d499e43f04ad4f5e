"""What a step reads out of its rows: gathered log-probabilities, class scores, samples."""

from collections.abc import Sequence

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import (
    indptr_of,
    join_int32,
    pack_int32,
    repeated_int32,
)
from stemserve.service.constraints.allowed import Allowed, AllowedBits
from stemserve.service.request import Int32

NO_SLICES = repeated_int32(0, 1)


class StepReadouts:
    def __init__(self) -> None:
        self.num_gathers = 0
        self.num_gather_ids = 0
        self.num_classified = 0
        self.sampler_bytes = 0
        self._gather_rows: list[Int32] = []
        self._gather_lengths: list[Int32] = []
        self._gather_ids: list[Int32] = []
        self._classify_rows: list[Int32] = []
        self._sample_rows: list[int] = []
        self._sample_slots: list[int] = []
        self._sample_index: list[int] = []
        self._samplers: list[worker_pb2.Sampler] = []
        self._masks: list[worker_pb2.TokenMask] = []

    def add_gathers(self, rows: Int32, lengths: Int32, ids: Int32) -> None:
        """Read lengths[i] of the ids at rows[i]."""
        self._gather_rows.append(rows)
        self._gather_lengths.append(lengths)
        self._gather_ids.append(ids)
        self.num_gathers += len(rows)
        self.num_gather_ids += len(ids)

    def add_classified(self, rows: Int32) -> None:
        self._classify_rows.append(rows)
        self.num_classified += len(rows)

    def add_sample(self, row: int, slot: int, index: int) -> int:
        """Returns where the sample lies in the result."""
        self._sample_rows.append(row)
        self._sample_slots.append(slot)
        self._sample_index.append(index)
        return len(self._sample_rows) - 1

    def add_samples(self, rows: range, slots: Sequence[int], index: int) -> int:
        """One of each row; returns where the first lies in the result, before the others."""
        first = len(self._sample_rows)
        self._sample_rows += rows
        self._sample_slots += slots
        self._sample_index += [index] * len(rows)
        return first

    def add_sampler(self, sampler: worker_pb2.Sampler) -> None:
        self._samplers.append(sampler)
        self.sampler_bytes += sampler.ByteSize()

    def add_mask(self, slot: int, allowed: Allowed) -> None:
        """The sample of the slot is one of these tokens."""
        mask = worker_pb2.TokenMask(slot=slot)
        if isinstance(allowed, AllowedBits):
            mask.allowed = allowed.bits.tobytes()
        else:
            mask.allowed_ids = pack_int32(allowed.ids)
        self._masks.append(mask)

    @property
    def gather_rows(self) -> Int32:
        return join_int32(self._gather_rows)

    @property
    def classify_rows(self) -> Int32:
        return join_int32(self._classify_rows)

    @property
    def sample_rows(self) -> Int32:
        return np.array(self._sample_rows, np.int32)

    def write(self, plan: worker_pb2.StepPlan) -> None:
        plan.gather_indptr = NO_SLICES
        if self._gather_rows:
            plan.gather_rows = pack_int32(self.gather_rows)
            plan.gather_indptr = pack_int32(indptr_of(join_int32(self._gather_lengths)))
            plan.gather_ids = pack_int32(join_int32(self._gather_ids))
        if self._classify_rows:
            plan.classify_rows = pack_int32(self.classify_rows)
        if self._sample_rows:
            plan.sample_rows = pack_int32(self._sample_rows)
            plan.sample_slots = pack_int32(self._sample_slots)
            plan.sample_index = pack_int32(self._sample_index)
        plan.samplers.extend(self._samplers)
        plan.masks.extend(self._masks)
