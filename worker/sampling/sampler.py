"""The next tokens: drawn from logits as each slot's parameters say."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import Int32
from stemserve.kernels.sampling.slot_tables import (
    GREEDY_TEMPERATURE,
    SLOT,
    DrawnTokens,
    SlotTables,
)
from stemserve.worker.blobs import BadPlan
from stemserve.worker.sampling.host_draw import draw_on_host
from stemserve.worker.sampling.logit_edits import LogitEdits
from stemserve.worker.sampling.params import SamplerParams, TokenMask
from stemserve.worker.sampling.read_tokens import ReadTokens
from stemserve.worker.steps.reads import Samples
from stemserve.worker.steps.step import Step
from stemserve.worker.transfer import to_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token a sample. A sample that had nothing finite to draw from is failed."""

    tokens: Tensor  # [samples] int64; -1: the sample only reads
    logprobs: Tensor  # [samples] float32, raw: before bias, bans, temperature and truncation
    failed: Tensor  # [samples] bool
    top_counts: Int32  # [samples] how many of the columns below each sample asked for
    # [samples, most] int64, most likely first, then those asked for; no columns where nobody asks
    top_ids: Tensor
    top_logprobs: Tensor  # [samples, most] float32, raw

    def on_host(self) -> "Drawn":
        """Complete once an event that is recorded after this call has passed."""
        return Drawn(
            tokens=to_host(self.tokens),
            logprobs=to_host(self.logprobs),
            failed=to_host(self.failed),
            top_counts=self.top_counts,
            top_ids=to_host(self.top_ids),
            top_logprobs=to_host(self.top_logprobs),
        )


class Sampler:
    def __init__(self, slots: int, device: torch.device) -> None:
        self.tables = SlotTables(slots, device)
        self._params = np.zeros(slots, SLOT)
        self._edits = LogitEdits(slots, device)
        self._read = ReadTokens(slots)
        self._is_known = np.zeros(slots, np.bool_)
        self._has_token = np.zeros(slots, np.bool_)
        self._device = device

    def check(self, step: Step) -> None:
        """Raises BadPlan where the step reads a slot that holds nothing."""
        if not (step.reads_slots or len(step.samples.slots)):
            return
        unknown = step.samples.slots[~self._is_known[step.samples.slots]]
        if len(unknown):
            self._refuse_unknown(np.setdiff1d(unknown, [params.slot for params in step.samplers]))
        self._check_counts(step)
        if len(drafted := step.samples.drafted_slots):
            penalised = [params.slot for params in step.samplers if params.has_penalties]
            if self._edits.penalties.any(drafted).any() or np.isin(drafted, penalised).any():
                raise BadPlan("sample_slots: a slot with penalties is sampled at several rows")
        if not step.reads_slots:
            return
        read = -1 - step.token_ids[step.token_ids < 0]
        if not self._has_token[read].all():
            slot = int(read[~self._has_token[read]][0])
            raise BadPlan(f"token_ids: no token was sampled into slot {slot} yet")

    def admit(self, samplers: Iterable[SamplerParams]) -> None:
        new = tuple(samplers)
        if not new:
            return
        slots = np.asarray([params.slot for params in new], np.int64)
        rows = [(p.temperature, p.top_k, p.top_p, p.min_p, 0, p.seed) for p in new]
        self._params[slots] = np.array(rows, SLOT)
        self._is_known[slots] = True
        self._has_token[slots] = False
        for params in new:
            self._edits.admit(params)
            self._read.admit(params)
        self.tables.admit(slots, self._params[slots])

    def mask(self, masks: Sequence[TokenMask]) -> None:
        """What may be drawn in the next step; those of the step before are gone."""
        read = self._read.mask(masks)
        self._edits.mask([mask for mask in masks if mask.slot not in read])

    @contextmanager
    def kept_on_error(self, samples: Samples) -> Generator[None]:
        """An error inside takes back the tokens that were drawn inside."""
        before = self.tables.last_token.clone() if len(samples.slots) else None
        try:
            yield
        except Exception:
            if before is not None:
                self.tables.last_token.copy_(before)
            raise

    def takes_likeliest(self, samples: Samples) -> NDArray[np.bool_]:  # [samples]
        """Which samples are the most likely token, whatever the logits of the others."""
        is_greedy = self._params["temperature"][samples.slots] <= GREEDY_TEMPERATURE
        return self.is_plain(samples) & is_greedy

    def is_plain(self, samples: Samples) -> NDArray[np.bool_]:  # [samples]
        """Which samples the tables of the slots say all about."""
        slots, index = samples.slots, samples.index
        self._refuse_unknown(slots[~self._is_known[slots]])
        reads = self._read.only(slots) | (self._read.counts(slots) > 0)
        plain: NDArray[np.bool_] = ~(reads | self._edits.any(slots, index))
        return plain

    def only_reads(self, samples: Samples) -> NDArray[np.bool_]:  # [samples]
        """Which samples draw nothing: they are for `read`, not for `draw`."""
        return self._read.only(samples.slots)

    def drew(self, slots: Int32) -> None:
        """The device put tokens into these slots ([drawn])."""
        self._has_token[slots] = True

    def end(self, samples: Samples) -> None:
        """All samples of a step are drawn: who was drawn several times has no last token."""
        self._has_token[samples.drafted_slots] = False

    def take(
        self,
        tokens: Tensor,  # [samples] int64, the most likely ones
        logprobs: Tensor,  # [samples] float32
        failed: Tensor,  # [samples] bool
        slots: Int32,  # [samples]
    ) -> Drawn:
        self.tables.last_token[index_tensor(slots, self._device)] = tokens
        self.drew(slots)
        none = logprobs.new_empty((len(slots), 0))
        return Drawn(
            tokens=tokens,
            logprobs=logprobs,
            failed=failed,
            top_counts=np.zeros(len(slots), np.int32),
            top_ids=none.long(),
            top_logprobs=none,
        )

    def draw(
        self,
        logits: Tensor,  # [samples, vocab] float32
        samples: Samples,
    ) -> Drawn:
        slots, index = samples.slots, samples.index
        special = np.flatnonzero(~self.is_plain(samples))
        if not len(special):
            return self.take(*self._draw(logits, slots, index), slots)
        rows = index_tensor(special, self._device)
        raw = _log_softmax(logits[rows])
        drawn = self._draw(self._edits.applied(logits, slots, index), slots, index)
        logprobs = raw.gather(-1, drawn.tokens[rows, None]).squeeze(-1)
        counts = self._read.counts(slots)
        most = int(counts.max())
        top_ids, top_logprobs = self._read.read(raw, slots[special], most)
        taken = self.take(
            drawn.tokens,
            drawn.logprobs.index_copy(0, rows, logprobs),
            # A NaN that is banned is left in the log-probabilities.
            drawn.failed.index_copy(0, rows, drawn.failed[rows] | ~logprobs.isfinite()),
            slots,
        )
        self._edits.penalties.drew(slots, index, drawn.tokens)
        nothing = raw.new_zeros((len(slots), most))
        return replace(
            taken,
            top_counts=counts,
            top_ids=nothing.long().index_copy(0, rows, top_ids),
            top_logprobs=nothing.index_copy(0, rows, top_logprobs),
        )

    def read(
        self,
        logits: Tensor,  # [samples, vocab] float32
        samples: Samples,
    ) -> Drawn:
        """No tokens: the likeliest ones of samples that only read."""
        raw, counts = _log_softmax(logits), self._read.counts(samples.slots)
        top_ids, top_logprobs = self._read.read(raw, samples.slots, int(counts.max()))
        return Drawn(
            tokens=torch.full((len(raw),), -1, device=raw.device),
            logprobs=raw.new_zeros(len(raw)),
            failed=raw[:, 0].isnan(),  # of logits that are not finite, all are
            top_counts=counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _draw(self, logits: Tensor, slots: Int32, index: Int32) -> DrawnTokens:
        if self._device.type == "cpu":
            return draw_on_host(logits, self._params[slots], index)
        # Here, so that a host without a GPU does without Triton.
        from stemserve.kernels.sampling.draw import draw_tokens

        # One copy; both begin at multiples of 16 bytes, as those of captured steps do.
        count = len(slots)
        where = np.zeros((2, count + count % 2), np.int64)
        where[:, :count] = slots, index
        on_device = device_tensor(where, self._device)[:, :count]
        return draw_tokens(logits, self.tables, on_device[0], on_device[1])

    def _check_counts(self, step: Step) -> None:
        unknown = self._edits.penalties.unknown(step.samples.slots, step.samples.index)
        if not unknown.any():
            return
        new = [params.slot for params in step.samplers]
        wrong = np.setdiff1d(step.samples.slots[unknown], new)
        if len(wrong):
            raise BadPlan(
                f"sample_index: slot {wrong[0]} has drawn fewer tokens than its penalties count"
            )

    def _refuse_unknown(self, slots: NDArray[np.integer]) -> None:
        if len(slots):
            raise BadPlan(f"sample_slots: no sampler was sent for slot {int(slots[0])}")


def _log_softmax(logits: Tensor) -> Tensor:  # [rows, vocab]
    """Of rows that begin at multiples of 16 bytes: other places may have other sums on a GPU."""
    vocab = logits.shape[1]
    return F.pad(logits, (0, -vocab % 4), value=-torch.inf).log_softmax(-1)[:, :vocab]
