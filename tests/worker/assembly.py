"""A runner of given parts."""

from typing import Protocol

import torch
from tests.worker.tiny_model import COSTS, CPU, VOCAB, step_limits

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.registry import strategies
from stemserve.worker.choice.dispatch import Dispatcher
from stemserve.worker.forward import Forward, Model
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.runner import ModelRunner
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Heads, Scorer


class RunnableModel(Model, Heads, Protocol):
    """A model as a runner uses it."""


def assemble(model: RunnableModel, heads: HeadShape, pool: KvPool) -> ModelRunner:
    """Of a tiny model, on the CPU."""
    limits = step_limits(pool.shape.page_size)
    sampler = Sampler(limits.sampler_slots, CPU)
    available = strategies(
        heads, device=CPU, dtype=torch.float32, page_dtype=pool.shape.dtype, costs=COSTS
    )
    return ModelRunner(
        Forward(model, pool, sampler, limits.max_step_tokens),
        pool,
        Dispatcher(available, COSTS, forced=None),
        sampler,
        Scorer(model, sampler, vocab_size=VOCAB, device=CPU),
        limits,
    )
