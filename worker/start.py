"""Makes a worker's parts from its configuration: model, KV cache, costs, strategies, runner."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.cost_table_file import tables_json
from stemserve.kernels.registry import StrategySet, deterministic_set, strategy_set
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.choice.costs import device_costs
from stemserve.worker.choice.dispatch import Dispatcher
from stemserve.worker.choice.probe import Prober, make_prober
from stemserve.worker.config import ConfigError, WorkerConfig
from stemserve.worker.device_choice import check_page_size, page_dtype, pick_device, pick_dtype
from stemserve.worker.forward import Forward
from stemserve.worker.graphs.score_pieces import capture_pieces, piece_bytes
from stemserve.worker.jit_cache import check_triton_cache
from stemserve.worker.memory.budget import (
    MIB,
    GpuMemory,
    cpu_kv_room,
    held_bytes,
    is_shortage,
    kv_pages,
)
from stemserve.worker.memory.device_limits import burst_steps, step_limits
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.memory.trial import MakeRunner, measure_memory
from stemserve.worker.models.loader import fixed_ops, load_model
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.models.weights import Progress
from stemserve.worker.runner import Decoder, ModelRunner
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.warm_up import warm_up

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
# Kept free on a GPU for decode graphs, which are captured once the KV cache is there.
GRAPH_BYTES = 1 << 30
GPU_ADVICE = (
    "pass a larger --gpu-memory-utilization, or a smaller --kv-pages, --kv-memory, "
    "--max-step-tokens (of a worker alone: --kv-memory-bytes, --sampler-slots)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What serves the RPCs."""

    runner: ModelRunner
    facts: worker_pb2.DescribeResponse
    prober: Prober | None  # None: steps are not probed


def make_parts(config: WorkerConfig, progress: Progress, check: Callable[[], None]) -> Parts:
    """`check` may raise to end the start. Raises ConfigError or ModelError."""
    device = pick_device(config.device)
    check_page_size(config.page_size, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        check_triton_cache()
    model = _load(config, device, progress)
    heads = model.config.heads
    costs = device_costs(config.cost_table, heads, model.dtype, device, _checking(check))
    available = _strategies(config, model, costs)
    make_engine = partial(_make_engine, config, model, available, costs)

    def make_runner(pool: KvPool, limits: StepLimits) -> ModelRunner:
        return make_engine(pool, limits).runner()

    memory = None if device.type == "cpu" else _measure(config, model, make_runner)
    shape = _kv_shape(config, model, memory)
    limits = step_limits(config, model, shape)
    engine = make_engine(_make_pool(shape, device), limits)
    # On a CPU nothing is compiled.
    warm_up(engine.runner(), limits, {} if device.type == "cpu" else available.strategies)
    before = held_bytes(device)
    runner = engine.runner(_decode_graphs(config, model, available, engine, check))
    if _has_graphs(config, device):
        exact = config.deterministic
        capture_pieces(engine.forward, engine.runner(), model, limits, check, exact=exact)
    if memory is not None:
        memory.report(kv=shape.total_bytes, graphs=held_bytes(device) - before)
    rate = config.kernel_probe_rate
    prober = make_prober(engine.dispatcher, engine.pool, heads, model.dtype, rate=rate)
    return Parts(runner=runner, facts=_facts(config, model, shape, costs), prober=prober)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    forward: Forward
    pool: KvPool
    dispatcher: Dispatcher
    sampler: Sampler
    scorer: Scorer
    limits: StepLimits

    def runner(self, decoder: Decoder | None = None) -> ModelRunner:
        return ModelRunner(
            self.forward,
            self.pool,
            self.dispatcher,
            self.sampler,
            self.scorer,
            self.limits,
            decoder,
        )


def _decode_graphs(
    config: WorkerConfig,
    model: Transformer,
    available: StrategySet,
    engine: _Engine,
    check: Callable[[], None],
) -> Decoder | None:
    if not _has_graphs(config, model.device):
        return None
    # Here, so that a host without a GPU does without Triton.
    from stemserve.worker.graphs.worker_decoder import capture_decoder

    return capture_decoder(
        model,
        engine,
        available.strategies,
        forced=config.kernel,
        check=check,
        exact=config.deterministic,
    )


def _has_graphs(config: WorkerConfig, device: torch.device) -> bool:
    return config.cuda_graphs and device.type == "cuda"


def _make_engine(
    config: WorkerConfig,
    model: Transformer,
    available: StrategySet,
    costs: CostTable,
    pool: KvPool,
    limits: StepLimits,
) -> _Engine:
    sampler = Sampler(limits.sampler_slots, model.device)
    dispatcher = Dispatcher(
        available.strategies,
        costs,
        forced=config.kernel,
        lacking=available.lacking,
        withheld=available.withheld,
        replayed=(),  # the layers of a step are launched one by one
        laid_out=_has_graphs(config, model.device),
    )
    # One by one on a CPU, where reductions of a single row and of several differ.
    draws = 1 if config.deterministic and model.device.type == "cpu" else None
    scorer = Scorer(
        model,
        sampler,
        vocab_size=limits.vocab_size,
        device=model.device,
        draws_at_once=draws,
    )
    forward = Forward(model, pool, sampler, limits.max_step_tokens)
    return _Engine(
        forward=forward,
        pool=pool,
        dispatcher=dispatcher,
        sampler=sampler,
        scorer=scorer,
        limits=limits,
    )


def _strategies(config: WorkerConfig, model: Transformer, costs: CostTable) -> StrategySet:
    heads, device, dtype = model.config.heads, model.device, model.dtype
    if config.deterministic:
        return deterministic_set(heads, device=device, dtype=dtype)
    pages = page_dtype(config.kv_cache_dtype, dtype, device)
    return strategy_set(heads, device=device, dtype=dtype, page_dtype=pages, costs=costs)


def _load(config: WorkerConfig, device: torch.device, progress: Progress) -> Transformer:
    try:
        return load_model(
            config.model,
            load_format=config.load_format,
            dtype=pick_dtype(config.dtype, device),
            device=device,
            progress=progress,
            make_ops=fixed_ops if config.deterministic else None,
        )
    except Exception as error:
        if is_shortage(error):
            raise ConfigError(f"not enough memory for the weights of {config.model}") from error
        raise


def _checking(check: Callable[[], None]) -> Progress:
    def progress(done: int, total: int) -> None:
        check()

    return progress


def _measure(config: WorkerConfig, model: Transformer, make_runner: MakeRunner) -> GpuMemory:
    one_page = _one_page(config, model)
    limits = step_limits(config, model, one_page)
    graphs = 0
    if _has_graphs(config, model.device):
        graphs = GRAPH_BYTES + piece_bytes(model, limits.max_step_tokens)
    return measure_memory(make_runner, limits, one_page, model.device, graphs)


def _one_page(config: WorkerConfig, model: Transformer) -> KvShape:
    return KvShape(
        layers=model.config.num_layers,
        pages=1,
        page_size=config.page_size,
        kv_heads=model.config.kv_heads,
        head_dim=model.config.head_dim,
        dtype=page_dtype(config.kv_cache_dtype, model.dtype, model.device),
    )


def _kv_shape(config: WorkerConfig, model: Transformer, memory: GpuMemory | None) -> KvShape:
    one_page = _one_page(config, model)
    if memory is None:
        room = cpu_kv_room()
    else:
        room = memory.kv_room(config.gpu_memory_utilization, GPU_ADVICE)
    pages = kv_pages(config.kv_pages, config.kv_memory_bytes, one_page.total_bytes, room)
    return one_page.with_pages(pages)


def _make_pool(shape: KvShape, device: torch.device) -> KvPool:
    log.info(
        "KV cache: %d pages of %d tokens in %s, %.0f MiB",
        shape.pages,
        shape.page_size,
        shape.dtype,
        shape.total_bytes / MIB,
    )
    try:
        return KvPool(shape, device)
    except Exception as error:
        if is_shortage(error):
            raise ConfigError(
                f"not enough memory for {shape.pages} KV pages of {shape.total_bytes} bytes: pass "
                "a smaller --kv-pages, --kv-memory (of a worker alone: --kv-memory-bytes) "
                "or --gpu-memory-utilization"
            ) from error
        raise


def _facts(
    config: WorkerConfig, model: Transformer, kv: KvShape, costs: CostTable
) -> worker_pb2.DescribeResponse:
    described = model.config
    return worker_pb2.DescribeResponse(
        model=_model_name(config.model.resolve()),
        architecture=described.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        vocab_size=described.vocab_size,
        context_tokens=described.context_tokens,
        layers=described.num_layers,
        query_heads=described.query_heads,
        kv_heads=described.kv_heads,
        head_dim=described.head_dim,
        page_size=kv.page_size,
        kv_pages=kv.pages,
        sampler_slots=config.sampler_slots,
        steps_in_flight=STEPS_IN_FLIGHT,
        has_lm_head=described.has_lm_head,
        class_labels=described.class_labels,
        kv_bytes_per_token=kv.bytes_per_token,
        kv_dtype=str(kv.dtype).removeprefix("torch."),
        cost_table_json=tables_json([costs]),
        max_burst_steps=burst_steps(config, model.device),
        deterministic=config.deterministic,
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda or "",
    )


def _model_name(path: Path) -> str:
    if path.name == "config.json":
        return path.parent.name
    return path.name if path.is_dir() else path.stem
