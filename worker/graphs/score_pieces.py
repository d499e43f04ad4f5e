"""The pieces of a worker on a GPU for steps with prompts and items, captured when it starts."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.graphs.capture import Capture, make_capture
from stemserve.worker.graphs.piece_check import MOST_DIFFERENCE, check_steps, difference
from stemserve.worker.graphs.start_graphs import run_captures
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.steps.checks import StepLimits

log = logging.getLogger(__name__)

# Larger steps are launched one by one: only on a slow host is the device faster than that.
MOST_ROWS = 9216
# An H200, 28 layers: a bucket takes 46 ms and 8 MiB, beside the memory that all of them share.
BUCKET_STEPS = ((1024, 64), (2048, 128), (MOST_ROWS, 256))
LEAST_ROWS = 32
GRAPH_BYTES = 384 << 10  # of one, as the driver keeps it


class Captured(Protocol):
    def capture(
        self, model: Transformer, buckets: Sequence[int], capture: Capture
    ) -> Iterator[int]: ...

    def drop_pieces(self) -> None: ...


class Steps(Protocol):
    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult: ...


def piece_buckets(most: int) -> list[int]:
    """Rows, ascending: padding is a sixteenth of a large step, and nothing of the largest one."""
    buckets = [LEAST_ROWS]
    for end, step in BUCKET_STEPS:
        first = buckets[-1] // step * step + step
        buckets += range(first, end + 1, step)
    return sorted({*(bucket for bucket in buckets if bucket < most), min(most, MOST_ROWS)})


def capture_pieces(
    forward: Captured,
    runner: Steps,  # by `forward`
    model: Transformer,
    limits: StepLimits,
    check: Callable[[], None],  # may raise to end the start
    *,
    exact: bool = False,  # what is captured must give the bits of what is launched
) -> None:
    """Where the pieces cannot be captured, or give something else, steps do without."""
    buckets = piece_buckets(limits.max_step_tokens)
    plans = list(check_steps(limits))
    expected = [runner.step(plan) for plan in plans]
    captures = forward.capture(model, buckets, make_capture(model.device))
    what = "sets of pieces between attentions"
    try:
        run_captures(what, buckets, captures, check, model.device)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # what work took before it was captured
        found = [runner.step(plan) for plan in plans]
    except RuntimeError as error:  # torch's errors of CUDA and of memory are such
        problem = str(error)
    else:
        apart = max(map(difference, found, expected), default=0.0)
        if apart <= (0.0 if exact else MOST_DIFFERENCE):
            return
        problem = f"log-probabilities differ by {apart:.2g}"
    forward.drop_pieces()
    log.error("small steps are launched one by one, without captured pieces: %s", problem)


def piece_bytes(model: Transformer, max_rows: int) -> int:
    """Of device memory that the pieces take, at most: an estimate."""
    config, rows = model.config, min(max_rows, MOST_ROWS)
    heads = (2 * config.query_heads + 2 * config.kv_heads) * config.head_dim
    widest = 3 * config.intermediate_size + 2 * heads
    row_numbers = heads + 4 * config.hidden_size + widest
    graphs = len(piece_buckets(max_rows)) * config.num_layers * GRAPH_BYTES
    return rows * row_numbers * torch.finfo(model.dtype).bits // 8 + graphs
