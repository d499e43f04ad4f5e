"""Penalties on tokens of the prompt and on what a slot drew, counted where it is drawn.

The worker keeps what each slot drew, in order, on the device: how much of it counts is said by the
index of the draw, so that a step that runs again counts alike.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import Int32
from stemserve.worker.sampling.params import SamplerParams

FEWEST_COLUMNS = 256

PENALTIES = np.dtype(
    [("repetition", np.float32), ("presence", np.float32), ("frequency", np.float32)]
)


class Penalties:
    """Of all slots. The memory that they take is that of the slots which ever had some."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._has = np.zeros(slots, np.bool_)
        self._values = np.zeros(slots, PENALTIES)
        self._prompt = np.zeros(slots, np.int64)  # prompt ids of each slot, before what it drew
        self._known = np.zeros(slots, np.int64)  # tokens that it drew, as far as they are here
        self._ids = torch.zeros((0, FEWEST_COLUMNS), dtype=torch.int32, device=device)

    def admit(self, params: SamplerParams) -> None:
        slot = params.slot
        self._has[slot] = params.has_penalties
        if not params.has_penalties:
            return
        self._values[slot] = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        ids = np.concatenate((params.prompt_ids, params.generated_ids))
        self._prompt[slot] = len(params.prompt_ids)
        self._known[slot] = len(params.generated_ids)
        self._reserve(slot + 1, len(ids))
        self._ids[slot, : len(ids)] = device_tensor(ids, self._device)

    def any(self, slots: Int32) -> NDArray[np.bool_]:  # [samples]
        return self._has[slots]

    def unknown(self, slots: Int32, index: Int32) -> NDArray[np.bool_]:  # [samples]
        """Samples that would count tokens which were never drawn here."""
        return self._has[slots] & (index > self._known[slots])

    def apply(
        self,
        logits: Tensor,  # [samples, vocab] float32, changed
        slots: Int32,  # [samples]
        index: Int32,  # [samples] how many drawn tokens count
    ) -> None:
        lengths = self._prompt[slots] + index
        rows = np.flatnonzero(self._has[slots] & (lengths > 0))
        if not len(rows):
            return
        slots, lengths = slots[rows], lengths[rows]
        numbers = np.stack((rows, slots, self._prompt[slots], lengths)).astype(np.int64)
        row, slot, prompt, length = device_tensor(numbers, self._device)[:, :, None]
        place = torch.arange(int(lengths.max()), device=self._device)
        # Behind its end a row has its first token again: what is written there, is written twice.
        place = torch.where(place < length, place, 0)
        ids = self._ids[slot, place].long()  # [penalised, most]
        values = self._values[slots]
        changed = _repeated(logits[row, ids], self._column(values["repetition"]))
        if values["presence"].any() or values["frequency"].any():
            drawn = (torch.arange(ids.shape[1], device=self._device) < length) & (place >= prompt)
            counts = torch.zeros((len(rows), logits.shape[1]), device=self._device)
            times = counts.scatter_add_(1, ids, drawn.float()).gather(1, ids)
            changed -= self._column(values["frequency"]) * times
            changed -= self._column(values["presence"]) * (times > 0)
        logits.index_put_((row.expand_as(ids), ids), changed)

    def drew(
        self,
        slots: Int32,  # [samples]
        index: Int32,  # [samples]
        tokens: Tensor,  # [samples] int64
    ) -> None:
        rows = np.flatnonzero(self._has[slots])
        if not len(rows):
            return
        slots = slots[rows]
        columns = self._prompt[slots] + index[rows]
        self._known[slots] = np.maximum(self._known[slots], index[rows] + 1)
        self._reserve(0, int(columns.max()) + 1)
        where = device_tensor(np.stack((slots, columns)).astype(np.int64), self._device)
        new = tokens[index_tensor(rows, self._device)].int()
        self._ids.index_put_((where[0], where[1]), new)

    def _reserve(self, slots: int, columns: int) -> None:
        """Powers of two, so that it seldom grows."""
        rows, width = self._ids.shape
        if slots <= rows and columns <= width:
            return
        shape = (_grown(rows, slots), _grown(width, columns))
        grown = torch.zeros(shape, dtype=torch.int32, device=self._device)
        grown[:rows, :width] = self._ids
        self._ids = grown

    def _column(self, values: NDArray[np.float32]) -> Tensor:  # [n, 1]
        return device_tensor(values[:, None], self._device)


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else 1 << (needed - 1).bit_length()


def _repeated(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)
