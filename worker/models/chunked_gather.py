"""Log-probabilities of chosen tokens, from the logits of a few rows at a time."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import index_tensor
from stemserve.worker.models.layer_ops import Gathered

# Float32 logits of a few rows at a time: 164 rows of a vocabulary of 49,152.
LOGIT_BUFFER_BYTES = 32 << 20


def rows_at_once(vocab_size: int, buffer_bytes: int = LOGIT_BUFFER_BYTES) -> int:
    return max(1, buffer_bytes // (4 * vocab_size))


class ChunkedGather:
    def __init__(self, logits: Callable[[Tensor], Tensor], rows_at_once: int) -> None:
        self._logits = logits  # [n, hidden] to float32 [n, vocab]
        self._rows_at_once = rows_at_once

    def __call__(
        self,
        hidden: Tensor,  # [rows, hidden]
        rows: NDArray[np.integer],  # [chosen]
        tokens: NDArray[np.integer],  # [chosen]
    ) -> Gathered:
        device, count = hidden.device, len(hidden)
        logprobs = torch.empty(len(tokens), dtype=torch.float32, device=device)
        argmax = torch.empty(count, dtype=torch.int64, device=device)
        likeliest = torch.empty(count, dtype=torch.float32, device=device)
        failed = torch.empty(count, dtype=torch.bool, device=device)
        for start in range(0, count, self._rows_at_once):
            stop = min(start + self._rows_at_once, count)
            logits = self._logits(hidden[start:stop])
            of_rows = logits.log_softmax(-1)
            argmax[start:stop] = logits.argmax(-1)  # the lowest id on a tie
            likeliest[start:stop] = of_rows.amax(-1)
            # One NaN or +inf makes the whole row NaN.
            failed[start:stop] = of_rows[:, 0].isnan()
            if len(read := between(rows, start, stop)):
                cells = index_tensor(rows[read] - start, device), index_tensor(tokens[read], device)
                logprobs[index_tensor(read, device)] = of_rows[cells]
        return Gathered(logprobs, argmax, likeliest, failed)


def between(
    rows: NDArray[np.integer],  # [reads]
    start: int,
    stop: int,
) -> NDArray[np.intp]:
    """Which entries are rows of start..stop - 1."""
    return np.flatnonzero((rows >= start) & (rows < stop))
