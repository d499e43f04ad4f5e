"""Random weights for a model of any shape, for benchmarks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stemserve.worker.models.weights import Progress

_SEED = 0


def fill_with_random(slots: Mapping[str, Tensor], progress: Progress) -> None:
    """The same weights every time on one kind of device.

    Matrices keep the variance of what they multiply, so that activations stay near 1.
    """
    total = sum(slot.numel() for slot in slots.values())
    done = 0
    progress(done, total)
    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in slots.items():
        if slot.device not in generators:
            generators[slot.device] = torch.Generator(slot.device).manual_seed(_SEED)
        generator = generators[slot.device]
        if slot.dim() == 2:
            slot.normal_(0.0, slot.shape[1] ** -0.5, generator=generator)
        else:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            slot.normal_(mean, 0.1, generator=generator)
        done += slot.numel()
        progress(done, total)
