"""Runners of a small model to decode sequences with.

The model has random weights and needs nothing but its description.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tests.worker.decode_story import PAGE, PAGES, SLOTS, VOCAB

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.engine_cost import BlockEngine
from stemserve.kernels.registry import deterministic_set, strategies
from stemserve.kernels.strategy import TORCH, Kernel
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.choice.dispatch import Dispatcher
from stemserve.worker.forward import Forward
from stemserve.worker.graphs.capture import Capture, GraphCapture, run_again
from stemserve.worker.graphs.decode_memory import DecodeMemory
from stemserve.worker.graphs.graph_decoder import GraphDecoder
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.models.loader import LoadFormat, fixed_ops, load_model
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.runner import ModelRunner
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer
from stemserve.worker.steps.checks import StepLimits

MAX_BURST = 20
CPU = torch.device("cpu")
LIMITS = StepLimits(
    vocab_size=VOCAB,
    context_tokens=4096,
    page_size=PAGE,
    kv_pages=PAGES,
    sampler_slots=SLOTS,
    max_step_tokens=4096,
    has_lm_head=True,
    classes=0,
    max_burst_steps=MAX_BURST,
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Bytes matter, launches hardly.
COSTS = CostTable(
    device="cpu",
    dtype="float32",
    query_heads=8,
    kv_heads=2,
    head_dim=32,
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
class Rig:
    runner: ModelRunner
    pool: KvPool
    decoder: GraphDecoder | None  # None: launch by launch
    codec: CodecDecode | None  # of the graphs

    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        result = self.runner.step(plan)
        assert not result.error
        return result


def make_rig(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    buckets: Sequence[int] = (),  # rows of the graphs; none: launch by launch
    *,
    head_dim: int = 32,
    bins: int = 0,  # of the tree kernel; 0: as many as the device runs
    fixed_split: int = 0,  # tokens; 0: results may depend on the batch
) -> Rig:
    """All pages hold NaN. On a CPU the graphs' work is done anew each time."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"head_dim": head_dim}))
    model = load_model(
        folder,
        load_format=LoadFormat.DUMMY,
        dtype=dtype,
        device=device,
        make_ops=fixed_ops if fixed_split else None,
    )
    heads = model.config.heads
    pool = _poisoned_pool(model.config, dtype, device)
    sampler = Sampler(SLOTS, device)
    scorer = Scorer(model, sampler, vocab_size=VOCAB, device=device)
    decoder = codec = None
    if buckets:
        bins = bins or 3 * (device == CPU)
        numbers, division = DecodeNumbers(dtype=dtype), Division(fixed_split=fixed_split)
        codec = CodecDecode(heads, device, numbers, bins, division=division)
        memory = DecodeMemory(model, pool, codec, sampler.tables, rows=buckets, steps=MAX_BURST)
        capture: Capture = run_again if device == CPU else GraphCapture(device)
        assert list(memory.capture(capture)) == sorted(buckets, reverse=True)
        decoder = GraphDecoder(memory, pool, codec, sampler, scorer, forced=None)
    available = strategies(heads, device=device, dtype=dtype, costs=COSTS)
    if fixed_split:
        available = deterministic_set(heads, device=device, dtype=dtype).strategies
    runner = ModelRunner(
        Forward(model, pool, sampler, LIMITS.max_step_tokens),
        pool,
        # On a GPU, so that no library is compiled for these heads.
        Dispatcher(available, COSTS, forced=None if device == CPU else Kernel.CODEC),
        sampler,
        scorer,
        LIMITS,
        decoder,
    )
    return Rig(runner=runner, pool=pool, decoder=decoder, codec=codec)


def _poisoned_pool(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> KvPool:
    shape = KvShape(
        layers=config.num_layers,
        pages=PAGES,
        page_size=PAGE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    pool = KvPool(shape, device)
    pool.poison(np.arange(PAGES, dtype=np.int32))
    return pool
