"""How large a worker's steps may be: as it was told, or as suits its device."""

import torch

from stemserve.worker.config import (
    CPU_STEP_TOKENS,
    GPU_BURST_STEPS,
    GPU_STEP_TOKENS,
    WorkerConfig,
)
from stemserve.worker.memory.kv_pool import KvShape
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.steps.checks import StepLimits


def step_limits(config: WorkerConfig, model: Transformer, kv: KvShape) -> StepLimits:
    return StepLimits(
        vocab_size=model.config.vocab_size,
        context_tokens=model.config.context_tokens,
        page_size=kv.page_size,
        kv_pages=kv.pages,
        sampler_slots=config.sampler_slots,
        max_step_tokens=_step_tokens(config, model.device),
        has_lm_head=model.config.has_lm_head,
        classes=len(model.config.class_labels),
        max_burst_steps=burst_steps(config, model.device),
    )


def _step_tokens(config: WorkerConfig, device: torch.device) -> int:
    default = GPU_STEP_TOKENS if device.type == "cuda" else CPU_STEP_TOKENS
    return config.max_step_tokens or default


def burst_steps(config: WorkerConfig, device: torch.device) -> int:
    """A step of a CPU is so long that a burst would only hold its tokens back."""
    if config.max_burst_steps is not None:
        return config.max_burst_steps
    return GPU_BURST_STEPS if device.type == "cuda" else 1
