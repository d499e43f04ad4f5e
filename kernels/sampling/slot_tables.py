"""What each sampler slot draws by, and the token it drew last, on the device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor

# One slot's parameters, as kernels read them.
SLOT = np.dtype(
    [
        ("temperature", np.float32),  # at most GREEDY_TEMPERATURE: the most likely token
        ("top_k", np.int32),  # 0: off
        ("top_p", np.float64),  # 1: off
        ("min_p", np.float32),  # 0: off
        ("unused", np.int32),
        ("seed", np.uint64),
    ]
)
WORDS = SLOT.itemsize // 8
GREEDY_TEMPERATURE = 1e-5


class DrawnTokens(NamedTuple):
    tokens: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32: of the logits as they are
    failed: Tensor  # [n] bool: there was nothing finite to draw from


class SlotTables:
    """Their addresses never change, so that captured graphs may read them."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        # One more than there are slots: a spare one for rows that only fill up a batch, greedy.
        self.params = torch.zeros((slots + 1, WORDS), dtype=torch.int64, device=device)
        self.last_token = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    @property
    def spare(self) -> int:
        return self.slots

    def admit(
        self,
        slots: NDArray[np.integer],  # [n], no two the same
        params: NDArray[Any],  # [n] SLOT
    ) -> None:
        """One upload."""
        if not len(slots):
            return
        packed = np.empty((len(slots), 1 + WORDS), np.int64)
        packed[:, 0] = slots
        packed[:, 1:] = np.ascontiguousarray(params).view(np.int64).reshape(len(slots), WORDS)
        words = device_tensor(packed, self.device)
        self.params.index_copy_(0, words[:, 0], words[:, 1:])

    def token_ids(
        self,
        token_ids: Tensor,  # [rows] integers
    ) -> Tensor:  # [rows] int64
        """With -1 - slot replaced by the slot's last token."""
        ids = token_ids.long()
        return torch.where(ids < 0, self.last_token[(-1 - ids).clamp_min(0)], ids)
