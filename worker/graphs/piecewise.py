"""Steps of up to a few thousand rows: what lies between two attentions is one graph a layer.

A graph has a fixed number of rows. A step takes the smallest bucket that holds it; the rows behind
its own are padding, whose results nobody reads and whose keys and values are not stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.fused.heads import Heads
from stemserve.worker.graphs.capture import Capture
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.models.layer_ops import SplitHeads
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.steps.inputs import StepInputs
from stemserve.worker.steps.kv_writes import KvWrites

NOBODY = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRows:
    """What the pieces of one bucket read and write; a smaller bucket has the first rows."""

    residual: Tensor  # [rows, hidden]
    mixed: Tensor  # [rows, query_heads * head_dim], the result of an attention
    heads: Heads  # of the next one

    def first(self, rows: int) -> "StaticRows":
        return StaticRows(
            residual=self.residual[:rows],
            mixed=self.mixed[:rows],
            heads=Heads(*(part[:rows] for part in self.heads)),
        )


class BindsAttention(Protocol):
    """Attention of all rows of the step; see StepAttention."""

    def bound(self, heads: Heads, out: Tensor) -> Callable[[int], None]: ...


class Pieces:
    """The pieces of a model for one bucket: one before each attention but none after the last."""

    def __init__(
        self,
        static: StaticRows,
        room: Tensor,  # static.mixed, and what is behind it
        replays: Sequence[Callable[[], None]],
    ) -> None:
        self.static = static
        self.room = room
        self._replays = replays

    def run(self, rows: int, attend: BindsAttention) -> None:
        """From the first residual to the result of the last attention, and the last residual."""
        first, *others = self._replays
        first()
        # While the device begins.
        heads = Heads(*(part[:rows] for part in self.static.heads))
        out = self.room.view(len(self.room), *heads.q.shape[1:])
        run_attention = attend.bound(heads, out)
        run_attention(0)
        for layer, replay in enumerate(others, 1):
            replay()
            run_attention(layer)


class PiecewiseModel:
    """The forward pass of steps that fit a bucket."""

    def __init__(self, model: Transformer, pool: KvPool, inputs: StepInputs) -> None:
        self._model = model
        self._pool = pool
        self._inputs = inputs
        self._pieces: dict[int, Pieces] = {}
        self._static: StaticRows | None = None

    @property
    def static(self) -> StaticRows:
        """Of the largest bucket."""
        if self._static is None:
            raise RuntimeError("no bucket is captured")
        return self._static

    @property
    def buckets(self) -> list[int]:
        return sorted(self._pieces)

    def bucket(self, rows: int) -> int | None:
        """The rows that a step is padded to; None: too many for any bucket."""
        return next((bucket for bucket in self.buckets if bucket >= rows), None)

    @torch.inference_mode()
    def capture(self, buckets: Sequence[int], capture: Capture) -> Iterator[int]:
        """The largest first: the others fit into its memory. Yields each bucket that is done."""
        for bucket in sorted(buckets, reverse=True):
            if self._static is None:
                self._static = _static_rows(self._model, bucket)
            static = self._static.first(bucket)
            self._inputs.put(NOBODY, NOBODY, NOBODY, bucket)  # captured work runs once, too
            works = self._works(static, bucket)
            replays = [capture(work) for work in works]
            self._pieces[bucket] = Pieces(static, self._static.mixed, replays)
            yield bucket

    def run(
        self,
        token_ids: Tensor,  # [bucket], those of the step first
        rows: int,  # of the step
        attend: BindsAttention,
    ) -> None:
        """Up to the result of the last attention, and the last residual.

        Positions and slots of the bucket's rows are in the step inputs.
        """
        pieces = self._pieces[len(token_ids)]
        self._model.embed_into(token_ids, pieces.static.residual)
        pieces.run(rows, attend)

    def end(
        self,
        keep_rows: Tensor | None,  # [kept] rows that go on after the last attention; None: all
        rows: int,
    ) -> Tensor:  # [kept, hidden]
        static = self.static
        if keep_rows is None:
            return self._model.end(static.mixed[:rows], static.residual[:rows])
        return self._model.end(static.mixed[keep_rows], static.residual[keep_rows])

    def _works(self, static: StaticRows, bucket: int) -> Iterator[Callable[[], None]]:
        inputs, model = self._inputs.fixed(bucket), self._model

        def split() -> SplitHeads:
            writes = KvWrites(self._pool, inputs.slots)
            return model.ops.heads(inputs.positions, writes, static.heads)

        def begin() -> None:
            model.begin(static.residual, split())

        def between(layer: int) -> None:
            model.between(layer, static.mixed, static.residual, split())

        yield begin
        for layer in range(model.config.num_layers - 1):
            yield partial(between, layer)


def _static_rows(model: Transformer, rows: int) -> StaticRows:
    config = model.config

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=model.dtype, device=model.device)

    return StaticRows(
        residual=zeros(config.hidden_size),
        mixed=zeros(config.query_heads * config.head_dim),
        heads=Heads(
            zeros(config.query_heads, config.head_dim),
            zeros(config.kv_heads, config.head_dim),
            zeros(config.kv_heads, config.head_dim),
        ),
    )
