"""A small random model, made by transformers, and runners of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.engine_cost import BlockEngine
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import TORCH, Kernel
from stemserve.worker.choice.dispatch import Dispatcher
from stemserve.worker.forward import Forward
from stemserve.worker.graphs.capture import GraphCapture, run_again
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.runner import ModelRunner
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer
from stemserve.worker.steps.checks import StepLimits

VOCAB = 83
CPU = torch.device("cpu")

# Bytes matter, launches hardly.
COSTS = CostTable(
    device="cpu",
    dtype="float32",
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    threads=1,
    libraries={},
    engines={
        TORCH: BlockEngine(
            launch_seconds=1e-7,
            tile_rows=32,
            rows=(1, 1024),
            kv_tokens=(1, 1024),
            seconds=((1e-6, 1e-3), (1e-6, 1e-3)),
        )
    },
    corrections={},
)


@dataclass(frozen=True, kw_only=True)
class TinyRunner:
    runner: ModelRunner
    pool: KvPool


def save_tiny_model(folder: Path, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,  # large: attention that matters
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    model.save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    return model


def kv_shape(config: ModelConfig, page_size: int) -> KvShape:
    return KvShape(
        layers=config.num_layers,
        pages=128,
        page_size=page_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )


def step_limits(page_size: int) -> StepLimits:
    return StepLimits(
        vocab_size=VOCAB,
        context_tokens=256,
        page_size=page_size,
        kv_pages=128,
        sampler_slots=8,
        max_step_tokens=256,
        has_lm_head=True,
        classes=0,
    )


def make_runner(
    folder: Path,
    *,
    forced: Kernel | None = None,
    page_size: int = 4,
    costs: CostTable = COSTS,
    device: torch.device = CPU,
    buckets: Sequence[int] = (),
) -> TinyRunner:
    """Steps that fit one of the buckets run by captured pieces."""
    model = load_model(folder, dtype=torch.float32, device=device)
    config = model.config
    pool = KvPool(kv_shape(config, page_size), device)
    limits = step_limits(page_size)
    sampler = Sampler(8, device)
    available = strategies(config.heads, device=device, dtype=torch.float32, costs=costs)
    forward = Forward(model, pool, sampler, limits.max_step_tokens)
    capture = run_again if device == CPU else GraphCapture(device)
    assert set(forward.capture(model, buckets, capture)) >= set(buckets)
    runner = ModelRunner(
        forward,
        pool,
        Dispatcher(available, costs, forced=forced),
        sampler,
        Scorer(model, sampler, vocab_size=VOCAB, device=device),
        limits,
    )
    return TinyRunner(runner=runner, pool=pool)


def oracle_logprobs(model: LlamaForCausalLM, tokens: Sequence[int]) -> Tensor:  # [tokens, vocab]
    """One sequence by itself through transformers."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.log_softmax(-1)
