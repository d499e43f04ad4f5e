"""What a step reads of its rows: log-probabilities, class scores and draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_int32
from stemserve.worker.steps.checks import StepLimits, check_range

NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """Token ids whose log-probabilities are read at some rows."""

    rows: Int32  # [gathers]
    indptr: Int32  # [gathers + 1]
    ids: Int32  # [indptr[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Tokens to draw: from which row, into which slot, and how many the slot drew before."""

    rows: Int32  # [samples]
    slots: Int32  # [samples]
    index: Int32  # [samples]
    drafted_slots: Int32 = field(default_factory=lambda: NONE)  # that are sampled at several rows

    def of(self, some: NDArray[np.integer]) -> "Samples":
        return Samples(rows=self.rows[some], slots=self.slots[some], index=self.index[some])


NO_SAMPLES = Samples(rows=NONE, slots=NONE, index=NONE)


def gathers_of(arrays: Mapping[str, Int32]) -> Gathers:
    # No slices at all may be written as an empty array.
    indptr = arrays["gather_indptr"]
    return Gathers(
        rows=arrays["gather_rows"],
        indptr=indptr if len(indptr) else np.zeros(1, np.int32),
        ids=arrays["gather_ids"],
    )


def decode_classify_rows(blob: bytes, limits: StepLimits, rows: int) -> Int32:
    if not blob:
        return NONE
    classify_rows = decode_int32("classify_rows", blob)
    if not limits.classes:
        raise BadPlan("classify_rows: the model has no classification head")
    check_range("classify_rows", classify_rows, 0, rows)
    return classify_rows


def decode_samples(plan: worker_pb2.StepPlan, limits: StepLimits, rows: int) -> Samples:
    if not (plan.sample_rows or plan.sample_slots or plan.sample_index):
        return NO_SAMPLES
    samples = Samples(
        rows=decode_int32("sample_rows", plan.sample_rows),
        slots=decode_int32("sample_slots", plan.sample_slots),
        index=decode_int32("sample_index", plan.sample_index),
    )
    count = len(samples.rows)
    if len(samples.slots) != count or len(samples.index) != count:
        raise BadPlan(
            f"{count} sample_rows, {len(samples.slots)} sample_slots "
            f"and {len(samples.index)} sample_index differ"
        )
    if not limits.has_lm_head:
        raise BadPlan("sample_rows: the model has no LM head")
    check_range("sample_rows", samples.rows, 0, rows)
    check_range("sample_slots", samples.slots, 0, limits.sampler_slots)
    check_range("sample_index", samples.index, 0, np.iinfo(np.int32).max)
    return replace(samples, drafted_slots=_drafted_slots(samples))


def _drafted_slots(samples: Samples) -> Int32:
    slots = samples.slots
    if len(slots) < 2 or (slots[1:] > slots[:-1]).all():
        return NONE
    ordered = np.sort(slots)
    again = ordered[1:] == ordered[:-1]
    if not again.any():
        return NONE
    draws = np.sort(slots.astype(np.int64) << 32 | samples.index)
    if (draws[1:] == draws[:-1]).any():
        raise BadPlan("sample_slots: a slot is sampled twice with one sample_index")
    return np.unique(ordered[1:][again])
