"""Label probabilities: the reads of a call, and the probabilities from what was read."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.scores.label_trie import LabelReads, plan_label_reads
from stemserve.service.calls.scores.reading import Readout, Reads, Values
from stemserve.service.calls.scores.score_call import ScoreCall, ScoredRows
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import join, offsets
from stemserve.service.request import Float32, Int32

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelScoring:
    labels: LabelReads
    rows: int
    options: inference_pb2.LabelProbabilities

    @classmethod
    def plan(cls, call: ScoreCall, rows: ScoredRows) -> tuple[Reads, "LabelScoring"]:
        labels = plan_label_reads(call.labels)
        _check_room(call.limits, rows, labels)
        count = len(rows.items)
        reads = _one_read_a_row(rows, labels) if labels.is_one_read else _reads(rows, labels)
        return reads, cls(labels=labels, rows=count, options=call.request.label_probabilities)

    def take(self, rows: Int32) -> "LabelScoring":
        return replace(self, rows=len(rows))

    def read(self, values: Values) -> Readout:
        logprobs = self._label_logprobs(values.gather_logprobs)
        scores = np.exp(logprobs)
        summed = scores if self.labels.is_one_read else scores[:, self.labels.disjoint]
        mass = summed.sum(axis=1)
        if self.options.apply_softmax:
            scores = softmax(logprobs / (self.options.temperature or 1.0))
        return Readout(scores=scores.astype(np.float32), label_mass=mass.astype(np.float32))

    def _label_logprobs(self, gathered: Float32) -> Float64:  # [rows, labels]
        labels = self.labels
        by_row = gathered.reshape(self.rows, len(labels.gather_ids)).astype(np.float64)
        if labels.is_one_read:
            return by_row  # of distinct tokens, in the order of the labels
        summed: Float64 = np.add.reduceat(
            by_row[:, labels.label_reads], labels.label_indptr[:-1], axis=1
        )
        return summed


def _one_read_a_row(rows: ScoredRows, labels: LabelReads) -> Reads:
    row, ids = np.arange(len(rows.items) + 1, dtype=np.int32), labels.gather_ids
    return Reads(
        units=rows.sequences,
        unit_row=row[:-1],
        gather_unit=row[:-1],
        gather_offset=rows.sequences.lengths - 1,
        gather_indptr=row * np.int32(len(ids)),
        gather_ids=ids[None].repeat(len(rows.items), axis=0).ravel(),
    )


def _reads(rows: ScoredRows, labels: LabelReads) -> Reads:
    """Each item once with every suffix."""
    count, suffixes = len(rows.items), len(labels.suffixes)
    row = np.repeat(np.arange(count, dtype=np.int32), suffixes)
    suffix = np.tile(np.arange(suffixes, dtype=np.int32), count)
    return Reads(
        units=join(rows.sequences.take(row), labels.suffixes.take(suffix)),
        unit_row=row,
        gather_unit=_each_row(count, labels.gather_suffix, suffixes),
        gather_offset=(rows.sequences.lengths[:, None] - 1 + labels.gather_depth[None, :]).ravel(),
        gather_indptr=offsets(np.tile(np.diff(labels.gather_indptr), count)),
        gather_ids=np.tile(labels.gather_ids, count),
    )


def _check_room(limits: Limits, rows: ScoredRows, labels: LabelReads) -> None:
    count, suffixes = len(rows.items), len(labels.suffixes)
    tokens = len(rows.sequences.tokens) * suffixes + len(labels.suffixes.tokens) * count
    if tokens > limits.max_request_tokens:
        raise InvalidRequest(
            "label_probabilities",
            f"labels of several tokens repeat each item {suffixes} times: {tokens} tokens, more "
            f"than max_request_tokens ({limits.max_request_tokens}); send fewer items or labels",
        )
    reads = count * len(labels.gather_ids)
    if reads > limits.max_message_bytes // 4:
        raise InvalidRequest(
            "label_probabilities",
            f"items and labels need {reads} log-probabilities, more than "
            f"{limits.max_message_bytes // 4}; send fewer items or labels",
        )


def softmax(values: Float64) -> Float64:  # [rows, columns], over columns
    weights = np.exp(values - values.max(axis=1, keepdims=True))
    normalized: Float64 = weights / weights.sum(axis=1, keepdims=True)
    return normalized


def _each_row(rows: int, units: NDArray[np.int32], per_row: int) -> NDArray[np.int32]:
    """Unit numbers within a row, as numbers within the call."""
    return (np.arange(rows, dtype=np.int32)[:, None] * per_row + units[None, :]).ravel()
