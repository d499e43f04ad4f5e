"""What a step reads from the final hidden states: log-probabilities, draws and class scores."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import index_tensor
from stemserve.worker.models.chunked_gather import LOGIT_BUFFER_BYTES, between, rows_at_once
from stemserve.worker.models.layer_ops import Gathered
from stemserve.worker.sampling.sampler import Drawn, Sampler
from stemserve.worker.steps.reads import Gathers, Samples
from stemserve.worker.steps.step import Step
from stemserve.worker.transfer import to_host

NOBODY = np.empty(0, np.int64)  # rows or tokens


class Heads(Protocol):
    def logits(self, hidden: Tensor) -> Tensor: ...  # [n, hidden] to float32 [n, vocab]

    def gather(
        self,
        hidden: Tensor,  # [n, hidden]
        rows: NDArray[np.integer],  # [chosen]
        tokens: NDArray[np.integer],  # [chosen]
    ) -> Gathered: ...

    def class_scores(self, hidden: Tensor) -> Tensor: ...  # [n, hidden] to float32 [n, classes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """The rows that a step reads, and who reads them, in order of rows."""

    rows: NDArray[np.intp]  # [kept] of the step, ascending: all that is needed of the last layer
    gathered: NDArray[np.intp]  # [gathered] positions in `rows` that gathers read, ascending
    sampled: NDArray[np.intp]  # [sampled] positions in `rows` that samples read, ascending
    classify_rows: NDArray[np.intp]  # [classified] positions in `rows`
    gather_rows: NDArray[np.intp]  # [gathers] positions in `gathered`
    id_rows: NDArray[np.intp]  # [gathered ids] positions in `gathered`
    sample_rows: NDArray[np.intp]  # [samples] positions in `sampled`


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    gather_logprobs: Tensor  # [gathered ids] float32
    gather_argmax: Tensor  # [gathers] int64
    class_scores: Tensor  # [classified, classes] float32
    failed_gathered: Tensor  # [gathered] bool
    failed_classified: Tensor  # [classified] bool
    draws: list[tuple[NDArray[np.intp], Drawn]]  # samples and what they drew

    def on_host(self) -> "Scores":
        """Complete once an event that is recorded after this call has passed."""
        return Scores(
            gather_logprobs=to_host(self.gather_logprobs),
            gather_argmax=to_host(self.gather_argmax),
            class_scores=to_host(self.class_scores),
            failed_gathered=to_host(self.failed_gathered),
            failed_classified=to_host(self.failed_classified),
            draws=[(samples, drawn.on_host()) for samples, drawn in self.draws],
        )


def plan_readout(step: Step) -> Readout:
    gathers, samples = step.gathers, step.samples
    if not (len(samples.rows) or len(step.classify_rows)) and _ascends(gathers.rows):
        return _gathers_only(gathers)
    gathered, gather_rows = _distinct(gathers.rows)
    sampled, sample_rows = _distinct(samples.rows)
    read, _ = _distinct(np.concatenate((gathered, sampled, step.classify_rows)))
    rows = read.astype(np.intp)
    return Readout(
        rows=rows,
        gathered=np.searchsorted(rows, gathered),
        sampled=np.searchsorted(rows, sampled),
        classify_rows=np.searchsorted(rows, step.classify_rows),
        gather_rows=gather_rows,
        id_rows=gather_rows.repeat(gathers.indptr[1:] - gathers.indptr[:-1]),
        sample_rows=sample_rows,
    )


def _gathers_only(gathers: Gathers) -> Readout:
    """Of rows in order, each once."""
    rows = gathers.rows.astype(np.intp)
    places = np.arange(len(rows))
    nobody = places[:0]
    return Readout(
        rows=rows,
        gathered=places,
        sampled=nobody,
        classify_rows=nobody,
        gather_rows=places,
        id_rows=places.repeat(gathers.indptr[1:] - gathers.indptr[:-1]),
        sample_rows=nobody,
    )


def _ascends(rows: NDArray[np.integer]) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def _distinct(rows: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.intp]]:
    """The rows ascending, each once, and where each of `rows` is there: mostly as they are."""
    if _ascends(rows):
        return rows, np.arange(len(rows))
    return np.unique(rows, return_inverse=True)


class Scorer:
    def __init__(
        self,
        heads: Heads,
        sampler: Sampler,
        *,
        vocab_size: int,
        device: torch.device,
        buffer_bytes: int = LOGIT_BUFFER_BYTES,
        draws_at_once: int | None = None,  # None: as many as rows
    ) -> None:
        self._heads = heads
        self._sampler = sampler
        self._device = device
        self._rows_at_once = rows_at_once(vocab_size, buffer_bytes)
        self._draws_at_once = draws_at_once or self._rows_at_once

    def read(
        self,
        step: Step,
        readout: Readout,
        hidden: Tensor,  # [kept, hidden]
    ) -> Scores:
        gathered = self._gather(step, readout, _picked(hidden, readout.gathered))
        scores, failed_scores = self._classify(_picked(hidden, readout.classify_rows))
        return Scores(
            gather_logprobs=gathered.logprobs,
            gather_argmax=_picked(gathered.argmax, readout.gather_rows),
            class_scores=scores,
            failed_gathered=gathered.failed,
            failed_classified=failed_scores,
            draws=list(self._sample(step, readout, _picked(hidden, readout.sampled))),
        )

    def _gather(self, step: Step, readout: Readout, hidden: Tensor) -> Gathered:
        if not len(hidden):
            kinds = (torch.float32, torch.int64, torch.float32, torch.bool)
            return Gathered(*(torch.empty(0, dtype=kind, device=self._device) for kind in kinds))
        return self._heads.gather(hidden, readout.id_rows, step.gathers.ids)

    def _sample(
        self, step: Step, readout: Readout, hidden: Tensor
    ) -> Iterator[tuple[NDArray[np.intp], Drawn]]:
        """How a sample is drawn depends on its own parameters only, never on the others."""
        likeliest = self._sampler.takes_likeliest(step.samples)
        if len(samples := np.flatnonzero(likeliest)):
            rows, at = np.unique(readout.sample_rows[samples], return_inverse=True)
            found = self._heads.gather(_picked(hidden, rows), NOBODY, NOBODY)
            tokens, logprobs, failed = (
                _picked(of_rows, at) for of_rows in (found.argmax, found.likeliest, found.failed)
            )
            slots = step.samples.slots[samples]
            yield samples, self._sampler.take(tokens, logprobs, failed, slots)
        reads = self._sampler.only_reads(step.samples)
        for some, read in ((reads, self._sampler.read), (~likeliest & ~reads, self._sampler.draw)):
            if len(samples := np.flatnonzero(some)):
                rows, at = np.unique(readout.sample_rows[samples], return_inverse=True)
                yield from self._of_logits(step, _picked(hidden, rows), samples, at, read)

    def _of_logits(
        self,
        step: Step,
        hidden: Tensor,
        samples: NDArray[np.intp],
        at: NDArray[np.intp],
        read: Callable[[Tensor, Samples], Drawn],
    ) -> Iterator[tuple[NDArray[np.intp], Drawn]]:
        """`at`: the row of hidden that each of the samples reads."""
        for start in range(0, len(hidden), self._rows_at_once):
            logits = self._heads.logits(hidden[start : start + self._rows_at_once])
            reading = between(at, start, start + len(logits))
            # Many samples may share a row, and each has its own copy of it.
            for first in range(0, len(reading), self._draws_at_once):
                now = reading[first : first + self._draws_at_once]
                some = samples[now]
                yield some, read(_picked(logits, at[now] - start), step.samples.of(some))

    def _classify(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if not len(hidden):
            nobody = torch.empty(0, dtype=torch.bool, device=self._device)
            return hidden.new_empty(0, 0, dtype=torch.float32), nobody
        scores = self._heads.class_scores(hidden)
        return scores, ~scores.isfinite().all(-1)


def _picked(rows: Tensor, positions: NDArray[np.intp]) -> Tensor:
    if np.array_equal(positions, np.arange(len(rows))):
        return rows
    return rows[index_tensor(positions, rows.device)]
