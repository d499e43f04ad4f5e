"""Log-likelihood of items: the reads of a call, and the sums from what was read."""

from dataclasses import dataclass, replace

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.scores.reading import Readout, Reads, Values
from stemserve.service.calls.scores.score_call import ScoreCall, ScoredRows
from stemserve.service.packed_tokens import offsets, slice_indices
from stemserve.service.request import Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LikelihoodScoring:
    scored_ids: Int32  # row by row
    scored_indptr: Int32  # [rows + 1]
    options: inference_pb2.LogLikelihood

    @classmethod
    def plan(cls, call: ScoreCall, rows: ScoredRows) -> tuple[Reads, "LikelihoodScoring"]:
        """Token j of a row is read after token j - 1, the first after the context's last token.

        Nothing is read after a row's last token; the batcher leaves out such tokens.
        """
        first = _first_scored(call, rows)
        counts = rows.sequences.lengths - first
        indices = slice_indices(rows.sequences.indptr[:-1] + first, counts)
        unit = np.arange(len(rows.items), dtype=np.int32)
        gather_unit = np.repeat(unit, counts)
        ids = rows.sequences.tokens[indices]
        reads = Reads(
            units=rows.sequences,
            unit_row=unit,
            gather_unit=gather_unit,
            gather_offset=indices - rows.sequences.indptr[gather_unit] - 1,
            gather_indptr=np.arange(len(ids) + 1, dtype=np.int32),
            gather_ids=ids,
        )
        options = call.request.log_likelihood
        return reads, cls(scored_ids=ids, scored_indptr=offsets(counts), options=options)

    def take(self, rows: Int32) -> "LikelihoodScoring":
        starts = self.scored_indptr[rows]
        counts = self.scored_indptr[rows + 1] - starts
        ids = self.scored_ids[slice_indices(starts, counts)]
        return replace(self, scored_ids=ids, scored_indptr=offsets(counts))

    def read(self, values: Values) -> Readout:
        starts = self.scored_indptr[:-1]
        sums = np.add.reduceat(values.gather_logprobs.astype(np.float64), starts)
        if self.options.length_normalized:
            sums /= np.diff(self.scored_indptr)
        greedy = np.logical_and.reduceat(values.gather_argmax == self.scored_ids, starts)
        wanted = self.options.token_logprobs
        return Readout(
            scores=sums.astype(np.float32),
            is_greedy=greedy,
            token_logprobs=values.gather_logprobs if wanted else None,
            token_indptr=self.scored_indptr if wanted else None,
        )


def _first_scored(call: ScoreCall, rows: ScoredRows) -> Int32:  # [rows]
    """With nothing before it, a row's first token cannot be predicted."""
    if call.request.item_first:
        return rows.item_lengths
    empty = np.array([not len(context) for context in call.contexts])
    return empty[rows.context].astype(np.int32)
