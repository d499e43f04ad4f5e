"""The decode graphs of a worker on a GPU, captured when it starts."""

import logging
from collections.abc import Callable
from typing import Protocol

from stemserve.kernels.codec.decode import CodecDecode
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.worker.choice.launch_costs import Strategies
from stemserve.worker.graphs.buckets import row_buckets
from stemserve.worker.graphs.capture import make_capture
from stemserve.worker.graphs.decode_check import MOST_DIFFERENCE, failures
from stemserve.worker.graphs.decode_memory import DecodeMemory
from stemserve.worker.graphs.graph_decoder import GraphDecoder
from stemserve.worker.graphs.start_graphs import run_captures
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.runner import Decoder, ModelRunner
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer
from stemserve.worker.steps.checks import StepLimits

log = logging.getLogger(__name__)

MOST_ROWS = 256  # more are bound by the device, not by launches


class Engine(Protocol):
    @property
    def pool(self) -> KvPool: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def scorer(self) -> Scorer: ...

    @property
    def limits(self) -> StepLimits: ...

    def runner(self, decoder: Decoder | None = None) -> ModelRunner: ...


def capture_decoder(
    model: Transformer,
    engine: Engine,
    strategies: Strategies,
    *,
    forced: Kernel | None,
    check: Callable[[], None],  # may raise to end the start
    exact: bool = False,  # what is captured must give the bits of what is launched
) -> GraphDecoder | None:
    """None where the model, or the forced kernel, leaves nothing to capture."""
    codec = strategies.get((Phase.DECODE, Kernel.CODEC))
    if not isinstance(codec, CodecDecode) or not model.has_lm_head:
        return None
    if forced not in (None, Kernel.CODEC):
        return None
    limits, pool, sampler = engine.limits, engine.pool, engine.sampler
    rows = row_buckets(min(MOST_ROWS, limits.sampler_slots, limits.max_step_tokens))
    memory = DecodeMemory(
        model, pool, codec, sampler.tables, rows=rows, steps=limits.max_burst_steps
    )
    captures = memory.capture(make_capture(model.device))
    run_captures("decode graphs", rows, captures, check, model.device)
    decoder = GraphDecoder(memory, pool, codec, sampler, engine.scorer, forced=forced)
    _check(decoder, engine, 0.0 if exact else MOST_DIFFERENCE)
    return decoder


def _check(decoder: GraphDecoder, engine: Engine, most_difference: float) -> None:
    captured, plain = engine.runner(decoder), engine.runner()
    wrong = failures(captured, plain, decoder.buckets, engine.limits, most_difference)
    for rows, problem in wrong.items():
        decoder.drop(rows)
        log.error("decode steps of %d rows have no graph: %s", rows, problem)
