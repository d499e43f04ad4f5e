"""Log-probabilities of tokens that samples ask for beside the one that they draw."""

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import Int32
from stemserve.worker.sampler_params import SamplerParams
from stemserve.worker.truncation import largest


class ReadTokens:
    """Of all slots: how many of the most likely tokens, and which others."""

    def __init__(self, slots: int) -> None:
        self._likeliest = np.zeros(slots, np.int32)
        self._counts = np.zeros(slots, np.int32)  # with the others
        self._ids: dict[int, Int32] = {}  # of slots that ask for some

    def admit(self, params: SamplerParams) -> None:
        slot, ids = params.slot, params.logprob_ids
        self._likeliest[slot] = params.top_logprobs
        self._counts[slot] = params.top_logprobs + len(ids)
        self._ids.pop(slot, None)
        if len(ids):
            self._ids[slot] = ids

    def counts(self, slots: Int32) -> Int32:  # [samples]
        return self._counts[slots]

    def read(
        self,
        raw: Tensor,  # [samples, vocab] log-probabilities
        slots: Int32,  # [samples]
        most: int,  # columns of the result
    ) -> tuple[Tensor, Tensor]:  # [samples, most] int64 and float32
        """What is behind a sample's count is of no use."""
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
