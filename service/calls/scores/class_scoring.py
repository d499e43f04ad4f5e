"""Scores of the classification head: the reads of a call, and the scores from what was read."""

from dataclasses import dataclass

import numpy as np

from stemserve.service.calls.scores.label_scoring import softmax
from stemserve.service.calls.scores.reading import NO_IDS, Readout, Reads, Values
from stemserve.service.calls.scores.score_call import ScoreCall, ScoredRows
from stemserve.service.request import Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScoring:
    apply_softmax: bool
    classes: int

    @classmethod
    def plan(cls, call: ScoreCall, rows: ScoredRows) -> tuple[Reads, "ClassScoring"]:
        reads = Reads(
            units=rows.sequences,
            unit_row=np.arange(len(rows.items), dtype=np.int32),
            gather_unit=NO_IDS,
            gather_offset=NO_IDS,
            gather_indptr=np.zeros(1, dtype=np.int32),
            gather_ids=NO_IDS,
            classify=True,
        )
        softmaxed = call.request.classification.apply_softmax
        return reads, cls(apply_softmax=softmaxed, classes=call.classes)

    def take(self, rows: Int32) -> "ClassScoring":
        return self

    def read(self, values: Values) -> Readout:
        scores = values.class_scores
        if scores.shape[1] != self.classes:  # none was classified before the deadline
            scores = np.full((len(scores), self.classes), np.nan, dtype=np.float32)
        if self.apply_softmax:
            scores = softmax(scores.astype(np.float64)).astype(np.float32)
        return Readout(scores=scores)
