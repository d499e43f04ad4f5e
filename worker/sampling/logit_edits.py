"""What some samples change about their logits: biases, penalties, tokens that must not come."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import Int32
from stemserve.worker.sampling.params import SamplerParams, TokenMask, UInt8
from stemserve.worker.sampling.penalties import Penalties


class LogitEdits:
    """Of all slots. Samples without any cost no work of their own."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.penalties = Penalties(slots, device)
        self._params: dict[int, SamplerParams] = {}  # of slots with edits
        self._always = np.zeros(slots, np.bool_)
        self._until = np.zeros(slots, np.int32)  # the index from which on no more is banned
        self._masks: dict[int, TokenMask] = {}  # by slot, of this step
        self._is_masked = np.zeros(slots, np.bool_)

    def admit(self, params: SamplerParams) -> None:
        slot = params.slot
        self._params.pop(slot, None)
        edits = (params.bias_ids, params.banned_ids, params.allowed_ids)
        self._always[slot] = any(len(ids) > 0 for ids in edits)
        banned = len(params.min_tokens_banned_ids) > 0
        self._until[slot] = params.min_new_tokens if banned else 0
        if self._always[slot] or self._until[slot]:
            self._params[slot] = params
        self.penalties.admit(params)

    def mask(self, masks: Sequence[TokenMask]) -> None:
        """Masks of one step, instead of those of the one before."""
        self._is_masked[list(self._masks)] = False
        self._masks = {mask.slot: mask for mask in masks}
        self._is_masked[list(self._masks)] = True

    def any(self, slots: Int32, index: Int32) -> NDArray[np.bool_]:  # [samples]
        return self._edits(slots, index) | self._is_masked[slots] | self.penalties.any(slots)

    def applied(
        self,
        logits: Tensor,  # [samples, vocab]
        slots: Int32,  # [samples]
        index: Int32,  # [samples]
    ) -> Tensor:
        """With biases, penalties, and what may not come banned; the same tensor without edits."""
        if not self.any(slots, index).any():
            return logits
        logits = logits.clone()
        masked = np.flatnonzero(self._is_masked[slots]).tolist()
        if masked:
            self._keep_allowed(logits, masked, slots)
        rows = np.flatnonzero(self._edits(slots, index)).tolist()
        edits = [(row, self._params[int(slots[row])]) for row in rows]
        biased = [(row, params.bias_ids) for row, params in edits if len(params.bias_ids)]
        if biased:
            values = np.concatenate([params.bias_values for _, params in edits])
            bias = device_tensor(values, logits.device)
            logits.index_put_(_cells(biased, logits.device), bias, accumulate=True)
        self.penalties.apply(logits, slots, index)
        allowed = [(row, params.allowed_ids) for row, params in edits if len(params.allowed_ids)]
        if allowed:
            _keep(logits, allowed)
        banned = [(row, params.banned_ids) for row, params in edits] + [
            (row, params.min_tokens_banned_ids)
            for row, params in edits
            if index[row] < params.min_new_tokens
        ]
        if any(len(columns) for _, columns in banned):
            minus_infinity = torch.full((), -torch.inf, device=logits.device)
            logits.index_put_(_cells(banned, logits.device), minus_infinity)
        return logits

    def _edits(self, slots: Int32, index: Int32) -> NDArray[np.bool_]:  # [samples]
        return self._always[slots] | (index < self._until[slots])

    def _keep_allowed(self, logits: Tensor, rows: list[int], slots: Int32) -> None:
        """In place."""
        masks = [(row, self._masks[int(slots[row])]) for row in rows]
        few = [(row, mask.ids) for row, mask in masks if len(mask.ids)]
        if few:
            _keep(logits, few)
        many = [(row, mask.bits) for row, mask in masks if not len(mask.ids)]
        if many:
            allowed = unpacked([bits for _, bits in many], logits)
            at = device_tensor(np.asarray([row for row, _ in many], np.int64), logits.device)
            logits[at] = torch.where(allowed, logits[at], -torch.inf)


def unpacked(bits: Sequence[UInt8], like: Tensor) -> Tensor:
    """[masks, vocab] which tokens of masks as bits may come; `like`: [rows, vocab] logits."""
    packed = device_tensor(np.stack(bits), like.device)
    places = torch.arange(8, dtype=torch.uint8, device=like.device)
    return (packed[:, :, None] >> places & 1).flatten(1)[:, : like.shape[1]].bool()


def _keep(logits: Tensor, allowed: Sequence[tuple[int, Int32]]) -> None:
    """Only these cells of their rows."""
    cells = _cells(allowed, logits.device)
    kept = logits[cells]
    logits[index_tensor(np.array([row for row, _ in allowed]), logits.device)] = -torch.inf
    logits.index_put_(cells, kept)


def _cells(ids: Sequence[tuple[int, Int32]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat([row for row, _ in ids], [len(columns) for _, columns in ids])
    columns = np.concatenate([columns for _, columns in ids])
    cells = device_tensor(np.stack((rows, columns)).astype(np.int64), device)
    return cells[0], cells[1]
