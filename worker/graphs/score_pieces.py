"""The pieces of a worker on a GPU for steps with prompts and items, captured when it starts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from stemserve.worker.graphs.capture import Capture, GraphCapture
from stemserve.worker.graphs.start_graphs import run_captures
from stemserve.worker.models.transformer import Transformer

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


def piece_buckets(most: int) -> list[int]:
    """Rows, ascending: padding is a sixteenth of a large step, and nothing of the largest one."""
    buckets = [LEAST_ROWS]
    for end, step in BUCKET_STEPS:
        first = buckets[-1] // step * step + step
        buckets += range(first, end + 1, step)
    return sorted({*(bucket for bucket in buckets if bucket < most), min(most, MOST_ROWS)})


def capture_pieces(
    forward: Captured,
    model: Transformer,
    max_rows: int,
    check: Callable[[], None],  # may raise to end the start
) -> None:
    buckets = piece_buckets(max_rows)
    captures = forward.capture(model, buckets, GraphCapture(model.device))
    run_captures("sets of pieces between attentions", buckets, captures, check, model.device)


def piece_bytes(model: Transformer, max_rows: int) -> int:
    """Of device memory that the pieces take, at most: an estimate."""
    config, rows = model.config, min(max_rows, MOST_ROWS)
    heads = (2 * config.query_heads + 2 * config.kv_heads) * config.head_dim
    widest = 3 * config.intermediate_size + 2 * heads
    row_numbers = heads + 4 * config.hidden_size + widest
    graphs = len(piece_buckets(max_rows)) * config.num_layers * GRAPH_BYTES
    return rows * row_numbers * torch.finfo(model.dtype).bits // 8 + graphs
