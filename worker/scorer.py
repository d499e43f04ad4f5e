"""What a step reads from the final hidden states: log-probabilities, draws and class scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.worker.sampler import Drawn, Sampler
from stemserve.worker.step import Step
from stemserve.worker.transfer import to_host

# Float32 logits of a few rows at a time: 164 rows of a vocabulary of 49,152.
LOGIT_BUFFER_BYTES = 32 << 20


class Heads(Protocol):
    def logits(self, hidden: Tensor) -> Tensor: ...  # [n, hidden] to float32 [n, vocab]

    def class_scores(self, hidden: Tensor) -> Tensor: ...  # [n, hidden] to float32 [n, classes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """The rows that a step reads, and who reads them, in order of rows."""

    rows: NDArray[np.intp]  # [kept] of the step, ascending: all that is needed of the last layer
    lm_rows: NDArray[np.intp]  # [lm rows] positions in `rows` that need logits, ascending
    classify_rows: NDArray[np.intp]  # [classified] positions in `rows`
    # The rest are positions in `lm_rows`.
    gather_rows: NDArray[np.intp]  # [gathers]
    id_rows: NDArray[np.intp]  # [gathered ids]
    sample_rows: NDArray[np.intp]  # [samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    gather_logprobs: Tensor  # [gathered ids] float32
    gather_argmax: Tensor  # [gathers] int64
    class_scores: Tensor  # [classified, classes] float32
    failed_rows: Tensor  # [lm rows] bool
    failed_classified: Tensor  # [classified] bool
    draws: list[tuple[NDArray[np.intp], Drawn]]  # samples and what they drew

    def on_host(self) -> "Scores":
        """Complete once an event that is recorded after this call has passed."""
        return Scores(
            gather_logprobs=to_host(self.gather_logprobs),
            gather_argmax=to_host(self.gather_argmax),
            class_scores=to_host(self.class_scores),
            failed_rows=to_host(self.failed_rows),
            failed_classified=to_host(self.failed_classified),
            draws=[(samples, drawn.on_host()) for samples, drawn in self.draws],
        )


def plan_readout(step: Step) -> Readout:
    gathers, samples = step.gathers, step.samples
    lm_rows = np.union1d(gathers.rows, samples.rows)
    rows = np.union1d(lm_rows, step.classify_rows).astype(np.intp)
    gather_rows = np.searchsorted(lm_rows, gathers.rows)
    return Readout(
        rows=rows,
        lm_rows=np.searchsorted(rows, lm_rows),
        classify_rows=np.searchsorted(rows, step.classify_rows),
        gather_rows=gather_rows,
        id_rows=np.repeat(gather_rows, np.diff(gathers.indptr)),
        sample_rows=np.searchsorted(lm_rows, samples.rows),
    )


class Scorer:
    def __init__(
        self,
        heads: Heads,
        sampler: Sampler,
        *,
        vocab_size: int,
        device: torch.device,
        buffer_bytes: int = LOGIT_BUFFER_BYTES,
    ) -> None:
        self._heads = heads
        self._sampler = sampler
        self._device = device
        self._rows_at_once = max(1, buffer_bytes // (4 * vocab_size))

    def read(
        self,
        step: Step,
        readout: Readout,
        hidden: Tensor,  # [kept, hidden]
    ) -> Scores:
        ids = step.gathers.ids.astype(np.int64)
        gather_logprobs = torch.empty(len(ids), dtype=torch.float32, device=self._device)
        lm_hidden = hidden[self._index(readout.lm_rows)]
        argmax = torch.empty(len(lm_hidden), dtype=torch.int64, device=self._device)
        failed = torch.empty(len(lm_hidden), dtype=torch.bool, device=self._device)
        draws: list[tuple[NDArray[np.intp], Drawn]] = []
        for start in range(0, len(lm_hidden), self._rows_at_once):
            stop = min(start + self._rows_at_once, len(lm_hidden))
            logits = self._heads.logits(lm_hidden[start:stop])
            logprobs = logits.log_softmax(-1)  # one a row, whoever reads it
            argmax[start:stop] = logits.argmax(-1)  # the lowest id on a tie
            # One NaN or +inf makes the whole row NaN.
            failed[start:stop] = logprobs[:, 0].isnan()
            if len(read := _between(readout.id_rows, start, stop)):
                cells = self._index(readout.id_rows[read] - start), self._index(ids[read])
                gather_logprobs[self._index(read)] = logprobs[cells]
            draws += self._draw(step, readout, start, logits, logprobs)
        scores, failed_scores = self._classify(hidden[self._index(readout.classify_rows)])
        return Scores(
            gather_logprobs=gather_logprobs,
            gather_argmax=argmax[self._index(readout.gather_rows)],
            class_scores=scores,
            failed_rows=failed,
            failed_classified=failed_scores,
            draws=draws,
        )

    def _draw(
        self, step: Step, readout: Readout, start: int, logits: Tensor, logprobs: Tensor
    ) -> Iterator[tuple[NDArray[np.intp], Drawn]]:
        samples = _between(readout.sample_rows, start, start + len(logits))
        # Many samples may share a row, and each has its own copy of it.
        for first in range(0, len(samples), self._rows_at_once):
            some = samples[first : first + self._rows_at_once]
            rows = self._index(readout.sample_rows[some] - start)
            slots, index = step.samples.slots[some], step.samples.index[some]
            yield some, self._sampler.draw(logits[rows], logprobs[rows], slots, index)

    def _classify(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if not len(hidden):
            return hidden.new_empty(0, 0), torch.empty(0, dtype=torch.bool, device=self._device)
        scores = self._heads.class_scores(hidden)
        return scores, ~scores.isfinite().all(-1)

    def _index(self, positions: NDArray[np.integer]) -> Tensor:
        return device_tensor(positions.astype(np.int64), self._device)


def _between(rows: NDArray[np.intp], start: int, stop: int) -> NDArray[np.intp]:
    """Which entries are rows of start..stop - 1."""
    return np.flatnonzero((rows >= start) & (rows < stop))
