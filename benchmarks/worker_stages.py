"""CPU time that a worker's host spends on a Score step of a GPU, by stage, without the GPU.

    python benchmarks/worker_stages.py

The plans are the batcher's. What the device does is left out: captured pieces and attention do
nothing. The time of CUDA's calls is left out with it, and that of Triton's launches.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from frontend_stages import Shape, no_result
from rich.console import Console
from rich.table import Table

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.dense.attention import DenseAttention, DensePlan
from stemserve.kernels.dense.launch import DeviceTiles, Matrix
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.page_gather import TokenScratch
from stemserve.kernels.pricing.cost_table_file import shipped_cost_tables, table_for_heads
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.request import ScoreJob, WorkerFacts
from stemserve.worker.attention import StepAttention
from stemserve.worker.choice.dispatch import Dispatcher
from stemserve.worker.forward import Forward
from stemserve.worker.graphs.score_pieces import piece_buckets
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.models.loader import LoadFormat, load_model
from stemserve.worker.runner import ModelRunner
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer, plan_readout
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.step import decode_step

Made = TypeVar("Made")

STEP_TOKENS, PAGES, PAGE_SIZE, SLOTS, LAYERS = 9216, 65_536, 16, 1024, 28
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "vocab_size": 4096,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    **HEADS,
}
ROWS = (
    Shape(prefix_tokens=300, items=10, item_tokens=30),
    Shape(prefix_tokens=512, items=100, item_tokens=128),
    Shape(prefix_tokens=2048, items=100, item_tokens=64),
    Shape(prefix_tokens=8192, items=32, item_tokens=4),
    Shape(prefix_tokens=8192, items=500, item_tokens=32),
)


class IdleLauncher:
    """Of a GPU with an H200's processors; it launches nothing."""

    processors = 132

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()

    def launch(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> None:
        return None

    def bound(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> Callable[[], None]:
        return partial(self.launch, tables, matrices, target)


class IdleDense(DenseAttention):
    """Plans as on a GPU."""

    def __init__(self, kernel: Kernel, shape: HeadShape, scratch: TokenScratch) -> None:
        super().__init__(kernel, shape, IdleLauncher(), scratch)

    def plan(self, layout: AttentionLayout) -> DensePlan:
        return replace(super().plan(layout), copy=None)


class UntimedRunner(ModelRunner):
    """As in all but a few steps on a GPU."""

    def _is_timed(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a worker has."""

    runner: ModelRunner
    dispatcher: Dispatcher
    pool: KvPool
    limits: StepLimits

    def laps(self, plan: worker_pb2.StepPlan) -> Iterator[tuple[str, float]]:
        """Stages of a step by themselves, and then the step."""
        step, seconds = _timed(lambda: decode_step(plan, self.limits))
        yield "decode and check", seconds
        choices, seconds = _timed(lambda: self.dispatcher.choose(step))
        yield "choose", seconds
        _, seconds = _timed(lambda: StepAttention(step, choices, self.pool, timed=False))
        yield "plan attention", seconds
        yield "plan what is read", _timed(lambda: plan_readout(step))[1]
        launched, seconds = _timed(lambda: self.runner.launch(plan))
        yield "launch, all of it", seconds
        yield "result", _timed(launched.result)[1]


def _timed(work: Callable[[], Made]) -> tuple[Made, float]:
    begin = time.thread_time()
    made = work()
    return made, time.thread_time() - begin


def make_host() -> Host:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODEL))
        model = load_model(path, load_format=LoadFormat.DUMMY, dtype=torch.float32)
    config, cpu = model.config, torch.device("cpu")
    kv = KvShape(
        layers=LAYERS,
        pages=PAGES,
        page_size=PAGE_SIZE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    pool = KvPool(replace(kv, layers=1), cpu)
    limits = StepLimits(
        vocab_size=config.vocab_size,
        context_tokens=config.context_tokens,
        page_size=PAGE_SIZE,
        kv_pages=PAGES,
        sampler_slots=SLOTS,
        max_step_tokens=STEP_TOKENS,
        has_lm_head=True,
        classes=0,
    )
    scratch = TokenScratch(config.heads, cpu, torch.float32, max_tokens=1 << 18)
    strategies: dict[tuple[Phase, Kernel], Strategy] = {
        (Phase.PREFILL, kernel): IdleDense(kernel, config.heads, scratch)
        for kernel in (Kernel.CASCADE, Kernel.SPLIT)
    }
    costs = table_for_heads(shipped_cost_tables("nvidia-h200"), config.heads)
    dispatcher = Dispatcher(strategies, costs, forced=None, replayed=())
    sampler = Sampler(SLOTS, cpu)
    forward = Forward(model, pool, sampler, STEP_TOKENS)
    for _ in forward.capture(model, piece_buckets(STEP_TOKENS), lambda work: lambda: None):
        pass
    scorer = Scorer(model, sampler, vocab_size=config.vocab_size, device=cpu)
    runner = UntimedRunner(forward, pool, dispatcher, sampler, scorer, limits)
    return Host(runner=runner, dispatcher=dispatcher, pool=pool, limits=limits)


def plans(shape: Shape, calls: int) -> Iterator[Sequence[worker_pb2.StepPlan]]:
    """Of calls one after another, each with a prefix that nobody has seen."""
    batcher = Batcher(_facts(), BatcherLimits(max_step_tokens=STEP_TOKENS), clock=time.monotonic)
    rng = np.random.default_rng(0)
    for number in range(calls):
        batcher.submit(_job(f"{number}", shape, rng))
        steps: list[worker_pb2.StepPlan] = []
        while (plan := batcher.plan_step()) is not None:
            steps.append(worker_pb2.StepPlan.FromString(plan.SerializeToString()))
            batcher.apply(no_result(plan))
        yield steps


def _job(name: str, shape: Shape, rng: np.random.Generator) -> ScoreJob:
    items, tokens = shape.items, shape.item_tokens
    vocab = int(str(MODEL["vocab_size"]))
    return ScoreJob(
        request_id=name,
        contexts=(rng.integers(0, vocab, shape.prefix_tokens, np.int32),),
        unit_tokens=rng.integers(0, vocab, items * tokens, np.int32),
        unit_indptr=np.arange(items + 1, dtype=np.int32) * tokens,
        unit_context=np.zeros(items, np.int32),
        gather_unit=np.arange(items, dtype=np.int32),
        gather_offset=np.full(items, tokens - 1, np.int32),
        gather_indptr=np.arange(items + 1, dtype=np.int32) * 2,
        gather_ids=np.tile(np.array([7, 9], np.int32), items),
    )


def _facts() -> WorkerFacts:
    return WorkerFacts(
        model="none",
        architecture="none",
        dtype="float32",
        device="none",
        vocab_size=int(str(MODEL["vocab_size"])),
        context_tokens=int(str(MODEL["max_position_embeddings"])),
        layers=LAYERS,
        query_heads=HEADS["num_attention_heads"],
        kv_heads=HEADS["num_key_value_heads"],
        head_dim=HEADS["head_dim"],
        page_size=PAGE_SIZE,
        kv_pages=PAGES,
        sampler_slots=SLOTS,
        steps_in_flight=2,
        has_lm_head=True,
        class_labels=(),
        kv_bytes_per_token=1,
    )


def measure(host: Host, shape: Shape, calls: int) -> dict[str, float]:
    """Milliseconds of a call by stage: the least of all calls."""
    laps: list[dict[str, float]] = []
    for steps in plans(shape, calls):
        seconds: dict[str, float] = {"steps": len(steps) / 1e3}
        for plan in steps:
            for stage, lap in host.laps(plan):
                seconds[stage] = seconds.get(stage, 0.0) + lap
        laps.append(seconds)
    return {stage: round(1e3 * min(lap[stage] for lap in laps), 3) for stage in laps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=40)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    host = make_host()
    by_shape = {shape.name: measure(host, shape, calls) for shape in ROWS}
    table = Table("", *by_shape, title="CPU milliseconds of a call")
    for stage in next(iter(by_shape.values())):
        table.add_row(stage, *(str(found[stage]) for found in by_shape.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
