"""What a step tells of its rows, on the device: one copy, to the same place in every step."""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.layout import Int32

ROW_ARRAYS = 3
BUFFERS = 4  # more than there are steps in flight, so that nobody waits for one


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    token_ids: Tensor  # [rows] int32, -1 - slot: the token last sampled into that slot
    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int32, page * page_size + place; -1: not stored


class StepInputs:
    """A later step's overwrite an earlier one's in the order of the device's stream."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._place = torch.zeros(ROW_ARRAYS * max_rows, dtype=torch.int32, device=device)
        if device.type == "cpu":
            self._buffers = [_HostBuffer(self._place)]
        else:
            self._buffers = [_PinnedBuffer(len(self._place)) for _ in range(BUFFERS)]
        self._turn = 0

    def fixed(self, rows: int) -> RowInputs:
        """Where `put` puts the arrays of so many rows."""
        token_ids, positions, slots = self._place[: ROW_ARRAYS * rows].view(ROW_ARRAYS, rows)
        return RowInputs(token_ids=token_ids, positions=positions, slots=slots)

    def put(
        self,
        token_ids: Int32,  # [rows]
        positions: Int32,  # [rows]
        kv_slots: Int32,  # [rows]
        padded_rows: int,  # at least as many; none of those behind is stored
    ) -> RowInputs:  # of all padded rows
        rows, size = len(token_ids), ROW_ARRAYS * padded_rows
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        packed = buffer.take()[:size].reshape(ROW_ARRAYS, padded_rows)
        for place, values in zip(packed, (token_ids, positions, kv_slots), strict=True):
            place[:rows] = values
        packed[:2, rows:] = 0
        packed[2, rows:] = -1
        buffer.send(self._place[:size])
        return self.fixed(padded_rows)


class _HostBuffer:
    """The place itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._array: NDArray[Any] = tensor.numpy()

    def take(self) -> NDArray[Any]:
        return self._array

    def send(self, place: Tensor) -> None:
        """Nothing to do."""


class _PinnedBuffer(_HostBuffer):
    def __init__(self, size: int) -> None:
        super().__init__(torch.zeros(size, dtype=torch.int32, pin_memory=True))
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self) -> NDArray[Any]:
        self._sent.synchronize()
        return super().take()

    def send(self, place: Tensor) -> None:
        place.copy_(self._tensor[: len(place)], non_blocking=True)
        self._sent.record()
