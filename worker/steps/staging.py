"""Arrays on their way to the device, from memory that the device reads while the host goes on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stemserve.kernels.layout import Int32

VIEWS_KEPT = 1024
BUFFERS = 3  # one more than there are steps in flight, so that nobody waits for one


class Staging:
    """Page-locked buffers in turn; on a CPU there is one, and a send is a copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        count = BUFFERS if on_gpu else 1
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu) for _ in range(count)
        ]
        self._sent: list[torch.cuda.Event | None] = [None] * count
        self._turn = 0
        self._kept: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def take(self) -> Int32:  # [size]
        """The next buffer, once the device has read what was in it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        buffer: Int32 = self._buffers[self._turn].numpy()
        return buffer

    def send(self, target: Tensor, parts: Sequence[slice]) -> None:
        """Parts of the buffer that was taken last, to the same places of a target of its size."""
        for part in parts:
            there, here = self._views(target, part)
            there.copy_(here, non_blocking=True)
        if target.is_cuda:
            event = self._sent[self._turn]
            if event is None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._sent[self._turn] = event
            event.record()

    def _views(self, target: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Of the target and the buffer; making them takes longer than the copy's launch."""
        key = (self._turn, part.start, part.stop)
        found = self._kept.get(key)
        if found is None or found[0] is not target:
            found = (target, target[part], self._buffers[self._turn][part])
            if len(self._kept) < VIEWS_KEPT:
                self._kept[key] = found
        return found[1:]
