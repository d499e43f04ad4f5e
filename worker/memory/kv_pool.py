"""The paged KV cache: one K and one V tensor of pages a layer."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import Int32
from stemserve.kernels.page_format import raw, to_pages

MAX_SLOTS = 2**31 - 1  # slots travel as int32


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.pages < 1:
            raise ValueError(f"the KV cache needs at least one page, not {self.pages}")
        if self.pages * self.page_size > MAX_SLOTS:
            raise ValueError(
                f"{self.pages} pages of {self.page_size} tokens are above {MAX_SLOTS} tokens"
            )

    def with_pages(self, pages: int) -> "KvShape":
        return replace(self, pages=pages)

    @property
    def bytes_per_token(self) -> int:
        """All layers, K and V."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return self.pages * self.page_size * self.bytes_per_token


class KvPool:
    def __init__(
        self, shape: KvShape, device: torch.device, *, stored_layers: int | None = None
    ) -> None:
        """`stored_layers`: fewer than the model has, which share them; for a trial."""
        layers = shape.layers if stored_layers is None else stored_layers
        size = (layers, shape.pages + 1, shape.page_size, shape.kv_heads, shape.head_dim)
        # Zeroed: whatever a kernel reads beyond a node's last token is finite.
        self._k = _zeros(size, shape.dtype, device)
        self._v = _zeros(size, shape.dtype, device)
        self._k_layers, self._v_layers = self._k.unbind(), self._v.unbind()
        # [layers, slots, kv_heads, head_dim], to be written by index
        self._k_slots = raw(self._k).flatten(1, 2)
        self._v_slots = raw(self._v).flatten(1, 2)
        self.shape = shape
        self.device = device

    @property
    def spare_page(self) -> int:
        """One more than the shape has: never written, for rows that only fill up a batch."""
        return self.shape.pages

    def k_pages(self, layer: int) -> Tensor:  # [pages + 1, page_size, kv_heads, head_dim]
        return self._k_layers[layer % len(self._k_layers)]

    def v_pages(self, layer: int) -> Tensor:  # [pages + 1, page_size, kv_heads, head_dim]
        return self._v_layers[layer % len(self._v_layers)]

    def write(
        self,
        layer: int,
        slots: Tensor,  # [rows] int64
        k: Tensor,  # [rows, kv_heads, head_dim]
        v: Tensor,  # [rows, kv_heads, head_dim]
    ) -> None:
        for places, values in ((self._k_slots, k), (self._v_slots, v)):
            stored = raw(to_pages(values, self.shape.dtype))
            places[layer % len(places)].index_copy_(0, slots, stored)

    def copy(self, copies: Int32) -> None:  # [copies, 3] source page, destination page, tokens
        """Copy the first tokens of pages, in all layers. No page is both source and destination."""
        if not len(copies):
            return
        page_size = self.shape.page_size
        copied = np.arange(page_size) < copies[:, 2:]  # [copies, page_size]
        slots = copies[:, :2, None].astype(np.int64) * page_size + np.arange(page_size)
        source, destination = device_tensor(slots.swapaxes(0, 1)[:, copied], self.device)
        for pool in (self._k_slots, self._v_slots):
            pool.index_copy_(1, destination, pool.index_select(1, source))

    def poison(self, pages: Int32) -> None:
        """Fill pages ([pages] numbers) that nobody may read with NaN, so that a read shows."""
        index = device_tensor(pages.astype(np.int64), self.device)
        nan = raw(torch.full((1,), torch.nan, device=self.device).to(self.shape.dtype))[0]
        for values in (raw(self._k), raw(self._v)):
            values.index_fill_(1, index, nan)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy leaves the zeros to the kernel, page by page; torch writes them: 7 s for 4 GiB.
    memory = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return device_tensor(memory, device).view(dtype).view(size)
