"""Buffers that FlashInfer's plans and kernels work in."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from stemserve.kernels.layout import HeadShape

PLAN_BYTES = 8 << 20  # work lists of one plan


def partial_bytes(shape: HeadShape, processors: int) -> int:
    """Of the partial results of divided requests, float32 with their log-sum-exp.

    fa2 divides tokens only where all tiles run at once: two a multiprocessor, of at most 128 rows x
    heads of a group, and it keeps as many rows of every head of the group as a tile has.
    """
    largest_tile = 128
    return 2 * processors * shape.group * largest_tile * (shape.head_dim + 1) * 4 + (1 << 20)


@dataclass(slots=True)
class PlanSpace:
    """Where one plan's work lists are: written on the host, copied to the device."""

    device: Tensor
    host: Tensor  # pinned
    copied: torch.cuda.Event

    def record(self) -> None:
        """The copy has been issued."""
        self.copied.record()

    def is_copied(self) -> bool:
        done: bool = self.copied.query()  # type: ignore[no-untyped-call]
        return done


class Workspace:
    """One a device, for plans and kernels of one stream.

    A plan has its space as long as it lives. A space is given out again once the device has
    copied it, since the host would write into a copy that is still to come.
    """

    def __init__(self, device: torch.device, partial_bytes: int) -> None:
        self._device = device
        self._free: list[PlanSpace] = []
        self.partial = torch.empty(partial_bytes, dtype=torch.uint8, device=device)

    def space(self, owner: object) -> PlanSpace:
        """A space that is free again when nobody holds `owner` any more."""
        for i, space in enumerate(self._free):
            if space.is_copied():
                del self._free[i]
                break
        else:
            space = self._new_space()
        weakref.finalize(owner, self._free.append, space).atexit = False
        return space

    def _new_space(self) -> PlanSpace:
        return PlanSpace(
            device=torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._device),
            host=torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True),
            copied=torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )
