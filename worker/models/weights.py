"""Fills a model's parameters from a checkpoint, and refuses one that does not fit exactly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stemserve.worker.models.errors import WeightsError
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import EMBEDDING, LM_HEAD

# Weights loaded, weights in all.
Progress = Callable[[int, int], None]

# Constants that old checkpoints store and the forward computes.
_BUFFERS = ("rotary_emb.inv_freq", "rope_freqs.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NAMES_SHOWN = 8


class WeightSource(Protocol):
    """Tensors under their Hugging Face names."""

    @property
    def source(self) -> str: ...

    def names(self) -> Sequence[str]: ...

    def read(self, name: str, config: ModelConfig) -> Tensor: ...


def fill(
    slots: Mapping[str, Tensor], source: WeightSource, config: ModelConfig, progress: Progress
) -> None:
    """Copy every tensor of the source into its slot, cast to the slot's type."""
    slots = _slots_of_tied_head(slots, source, config)
    names = [name for name in source.names() if not name.endswith(_BUFFERS)]
    _check_names(slots, names, source.source)
    total = sum(slots[name].numel() for name in names)
    done = 0
    progress(done, total)
    for name in names:
        tensor, slot = source.read(name, config), slots[name]
        if tensor.shape != slot.shape or tensor.dtype not in _DTYPES:
            raise WeightsError(
                f"{source.source}: {name} is {tuple(tensor.shape)} of {tensor.dtype}; "
                f"expected {tuple(slot.shape)} of float32, float16 or bfloat16"
            )
        slot.copy_(tensor)
        done += slot.numel()
        progress(done, total)
    _check_tied_head(slots, source, config)


def _slots_of_tied_head(
    slots: Mapping[str, Tensor], source: WeightSource, config: ModelConfig
) -> Mapping[str, Tensor]:
    """A tied checkpoint may hold the one matrix under either name, or twice."""
    if config.tied_head and config.has_lm_head and LM_HEAD in source.names():
        tied = {**slots, LM_HEAD: slots[EMBEDDING]}
        if EMBEDDING not in source.names():
            del tied[EMBEDDING]
        return tied
    return slots


def _check_tied_head(
    slots: Mapping[str, Tensor], source: WeightSource, config: ModelConfig
) -> None:
    if LM_HEAD not in slots or EMBEDDING not in slots:
        return
    if slots[LM_HEAD] is not slots[EMBEDDING]:
        return
    slot = slots[EMBEDDING]
    for name in (EMBEDDING, LM_HEAD):
        if not torch.equal(source.read(name, config).to(slot), slot):
            raise WeightsError(
                f"{source.source}: {EMBEDDING} and {LM_HEAD} differ, but the config says "
                "tie_word_embeddings; set it to false to keep both"
            )


def _check_names(slots: Mapping[str, Tensor], names: Sequence[str], source: str) -> None:
    missing = sorted(slots.keys() - set(names))
    unexpected = sorted(set(names) - slots.keys())
    if missing or unexpected:
        raise WeightsError(
            f"{source} does not fit its config: "
            f"missing tensors: {_listing(missing)}; unexpected tensors: {_listing(unexpected)}"
        )


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) or "none"
    hidden = len(names) - _NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
