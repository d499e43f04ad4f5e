"""What a step tells of its rows, on the device: one copy, to the same place in every step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stemserve.kernels.layout import Int32
from stemserve.worker.steps.staging import Staging

ROW_ARRAYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    token_ids: Tensor  # [rows] int32, -1 - slot: the token last sampled into that slot
    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int32, page * page_size + place; -1: not stored


class StepInputs:
    """A later step's overwrite an earlier one's in the order of the device's stream.

    In front of the rows there is a head for what else a step may upload.
    """

    def __init__(self, max_rows: int, head_entries: int, device: torch.device) -> None:
        size = head_entries + ROW_ARRAYS * max_rows
        self._place = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(size, device)
        self._kept: dict[int, RowInputs] = {}
        self.head = self._place[:head_entries]

    def fixed(self, rows: int) -> RowInputs:
        """Where `put` puts the arrays of so many rows."""
        if rows not in self._kept:
            self._kept[rows] = self._rows(rows)
        return self._kept[rows]

    def put(
        self,
        token_ids: Int32,  # [rows]
        positions: Int32,  # [rows]
        kv_slots: Int32,  # [rows]
        padded_rows: int,  # at least as many; none of those behind is stored
        fill_head: Callable[[Int32], None] | None = None,  # [head_entries]; None: not used
    ) -> RowInputs:  # of all padded rows
        rows, begin = len(token_ids), len(self.head)
        end = begin + ROW_ARRAYS * padded_rows
        buffer = self._staging.take()
        packed = buffer[begin:end].reshape(ROW_ARRAYS, padded_rows)
        for place, values in zip(packed, (token_ids, positions, kv_slots), strict=True):
            place[:rows] = values
        packed[:2, rows:] = 0
        packed[2, rows:] = -1
        if fill_head is not None:
            fill_head(buffer[:begin])
        self._staging.send(self._place, [slice(begin if fill_head is None else 0, end)])
        return self._kept.get(padded_rows) or self._rows(padded_rows)

    def _rows(self, rows: int) -> RowInputs:
        begin = len(self.head)
        arrays = self._place[begin : begin + ROW_ARRAYS * rows].view(ROW_ARRAYS, rows)
        return RowInputs(token_ids=arrays[0], positions=arrays[1], slots=arrays[2])
