"""Where the keys and values of one step's rows go in the pool."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.worker.memory.kv_pool import KvPool


class KvWrites:
    def __init__(
        self,
        pool: KvPool,
        slots: Tensor,  # [rows] int32; -1: not stored
    ) -> None:
        self._pool = pool
        self.slots = slots

    def k_pages(self, layer: int) -> Tensor:
        return self._pool.k_pages(layer)

    def v_pages(self, layer: int) -> Tensor:
        return self._pool.v_pages(layer)

    def write(
        self,
        layer: int,
        k: Tensor,  # [rows, kv_heads, head_dim]
        v: Tensor,  # [rows, kv_heads, head_dim]
    ) -> None:
        rows, slots = self._stored
        if len(slots):
            self._pool.write(layer, slots, k[rows], v[rows])

    @cached_property
    def _stored(self) -> tuple[slice | Tensor, Tensor]:
        """The rows that are stored, and their slots [stored] int64. On a GPU it waits."""
        kv_slots = self.slots.cpu().numpy()
        stored = np.flatnonzero(kv_slots >= 0)
        device = self._pool.device
        slots = index_tensor(kv_slots[stored], device)
        return _on_device(as_slice(stored), device), slots


def as_slice(rows: np.ndarray[Any, np.dtype[np.intp]]) -> slice | np.ndarray[Any, Any]:
    """Rows in order, as a slice where they follow each other."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _on_device(rows: slice | np.ndarray[Any, Any], device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else device_tensor(rows, device)
