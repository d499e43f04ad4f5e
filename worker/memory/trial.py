"""What the largest steps take of a GPU beside the weights: measured before the KV cache is made."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.config import ConfigError
from stemserve.worker.memory.budget import GIB, GpuMemory, is_shortage
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.memory.trial_steps import trial_pages, trial_steps
from stemserve.worker.steps.checks import StepLimits

log = logging.getLogger(__name__)


class Runs(Protocol):
    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult: ...


MakeRunner = Callable[[KvPool, StepLimits], Runs]


def measure_memory(
    make_runner: MakeRunner,
    limits: StepLimits,  # their kv_pages do not count
    kv: KvShape,
    device: torch.device,
    graphs: int,  # bytes to keep free for CUDA graphs
) -> GpuMemory:
    """Raises ConfigError where the steps do not fit."""
    _tidy()
    weights = torch.cuda.memory_allocated(device)
    limits = replace(limits, kv_pages=trial_pages(limits))
    try:
        peak = _peak(make_runner, limits, kv.with_pages(limits.kv_pages), device)
    except Exception as error:
        if not is_shortage(error):
            raise
        # Its frames hold what the step had allocated.
        shortage = str(error).partition("\n")[0]
    else:
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        kept = torch.cuda.memory_allocated(device) - weights  # what the strategies keep
        log.info("largest steps: %.2f GiB, of which %.2f stay", peak / GIB, kept / GIB)
        return GpuMemory(
            total=total, others=others, weights=weights, activations=peak, graphs=graphs
        )
    raise ConfigError(
        f"a step of {limits.max_step_tokens} rows does not fit beside {weights / GIB:.2f} GiB of "
        f"weights: pass a smaller --max-step-tokens or --sampler-slots ({shortage})"
    )


def _peak(make_runner: MakeRunner, limits: StepLimits, kv: KvShape, device: torch.device) -> int:
    """Bytes that the steps have at most, beside what was allocated before."""
    before = torch.cuda.memory_allocated(device)
    # The layers share their pages: nobody looks at the results.
    pool = KvPool(kv, device, stored_layers=1)
    pool_bytes = torch.cuda.memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    runner = make_runner(pool, limits)
    for plan in trial_steps(limits):
        runner.step(plan)
    peak = torch.cuda.max_memory_allocated(device) - pool_bytes - before
    del runner, pool
    _tidy()
    return peak


def _tidy() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
