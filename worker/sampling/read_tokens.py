"""Log-probabilities of tokens that samples ask for beside the one that they draw."""

from collections.abc import Sequence, Set

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import Int32
from stemserve.worker.sampling.masked_tops import masked_tops
from stemserve.worker.sampling.params import SamplerParams, TokenMask
from stemserve.worker.sampling.truncation import largest


class ReadTokens:
    """Of all slots: how many of the most likely tokens, and which others."""

    def __init__(self, slots: int) -> None:
        self._likeliest = np.zeros(slots, np.int32)
        self._counts = np.zeros(slots, np.int32)  # with the others
        self._ids: dict[int, Int32] = {}  # of slots that ask for some
        self._only = np.zeros(slots, np.bool_)  # slots that draw nothing; they read of their mask
        self._masks: dict[int, TokenMask] = {}  # of these, in this step

    def admit(self, params: SamplerParams) -> None:
        slot, ids = params.slot, params.logprob_ids
        self._likeliest[slot] = params.top_logprobs
        self._counts[slot] = params.top_logprobs + len(ids)
        self._only[slot] = params.reads_only
        self._ids.pop(slot, None)
        if len(ids):
            self._ids[slot] = ids

    def mask(self, masks: Sequence[TokenMask]) -> Set[int]:
        """Masks of one step, instead of those of the one before. Returns the slots that read of
        theirs, so that it is not for their logits."""
        self._masks = {mask.slot: mask for mask in masks if self._only[mask.slot]}
        return self._masks.keys()

    def only(self, slots: Int32) -> NDArray[np.bool_]:  # [samples]
        """Which draw nothing."""
        return self._only[slots]

    def counts(self, slots: Int32) -> Int32:  # [samples]
        counts = self._counts[slots]
        if self._masks:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._masks:
                    counts[row] = min(counts[row], self._masks[slot].size)
        return counts

    def read(
        self,
        raw: Tensor,  # [samples, vocab] log-probabilities
        slots: Int32,  # [samples]
        most: int,  # columns of the result
    ) -> tuple[Tensor, Tensor]:  # [samples, most] int64 and float32
        """What is behind a sample's count is of no use."""
        masks = [self._masks.get(slot) for slot in slots.tolist()]
        known = [mask for mask in masks if mask is not None]
        if not known:
            return self._read(raw, slots, most)
        if len(known) == len(masks):
            return self._read_masked(raw, known, slots, most)
        is_masked = np.array([mask is not None for mask in masks], np.bool_)
        ids, logprobs = raw.new_zeros((len(slots), most)).long(), raw.new_zeros((len(slots), most))
        for some in (is_masked, ~is_masked):
            at = index_tensor(np.flatnonzero(some), raw.device)
            if some is is_masked:
                found, values = self._read_masked(raw[at], known, slots[some], most)
            else:
                found, values = self._read(raw[at], slots[some], most)
            ids.index_copy_(0, at, found)
            logprobs.index_copy_(0, at, values)
        return ids, logprobs

    def _read_masked(
        self, raw: Tensor, masks: Sequence[TokenMask], slots: Int32, most: int
    ) -> tuple[Tensor, Tensor]:
        ids, logprobs = masked_tops(raw, masks, int(self.counts(slots).max()))
        return _padded(ids, most), _padded(logprobs, most)

    def _read(self, raw: Tensor, slots: Int32, most: int) -> tuple[Tensor, Tensor]:
        likeliest = self._likeliest[slots]
        columns = int(likeliest.max(initial=0))
        ids, logprobs = largest(raw, columns)
        asking = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._ids]
        if not asking:
            return _padded(ids, most), _padded(logprobs, most)
        others = np.zeros((len(slots), most), np.int64)
        is_other: NDArray[np.bool_] = np.arange(most) >= likeliest[:, None]
        for row, slot in asking:
            others[row, likeliest[row] :][: len(self._ids[slot])] = self._ids[slot]
        chosen = _padded(ids, most).where(
            ~device_tensor(is_other, raw.device), device_tensor(others, raw.device)
        )
        return chosen, raw.gather(1, chosen)


def _padded(values: Tensor, columns: int) -> Tensor:
    return F.pad(values, (0, columns - values.shape[1]))
