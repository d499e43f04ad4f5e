"""The end of a step that only reads log-probabilities: one graph, one upload, one download.

From the result of the last attention to log-probabilities of chosen tokens, for a fixed number of
rows and tokens; what is behind those of a step reads row 0 and token 0.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.worker.graphs.capture import Capture
from stemserve.worker.models.layer_ops import DeviceGather
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.scorer import Readout, Scores
from stemserve.worker.steps.step import Step
from stemserve.worker.transfer import to_host


class EndingSize(NamedTuple):
    rows: int  # that are read, and as many gathers
    tokens: int


ENDINGS = (EndingSize(16, 128), EndingSize(64, 256), EndingSize(128, 512), EndingSize(512, 2048))


class _Head(NamedTuple):
    """Parts of the head of the step inputs."""

    keep: Any  # [rows] of the step
    gather_rows: Any  # [gathers] positions in keep
    token_rows: Any  # [tokens] positions in keep
    tokens: Any

    @classmethod
    def of(cls, head: Any, largest: EndingSize, size: EndingSize) -> "_Head":
        rows, tokens = largest
        starts = (0, rows, 2 * rows, 2 * rows + tokens)
        counts = (size.rows, size.rows, size.tokens, size.tokens)
        return cls(*(head[at : at + count] for at, count in zip(starts, counts, strict=True)))


def head_entries(sizes: Sequence[EndingSize]) -> int:
    """Of the step inputs' head."""
    return 2 * sum(max(sizes, default=EndingSize(0, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """Of all rows and tokens of a size, side by side in bytes."""

    joined: Tensor  # uint8
    size: EndingSize

    @classmethod
    def new(cls, size: EndingSize, device: torch.device) -> "_Results":
        count = (8 + 1) * size.rows + 4 * size.tokens
        return cls(joined=torch.zeros(count, dtype=torch.uint8, device=device), size=size)

    @property
    def argmax(self) -> Tensor:  # [gathers] int64
        return self.joined[: 8 * self.size.rows].view(torch.int64)

    @property
    def logprobs(self) -> Tensor:  # [tokens] float32
        start = 8 * self.size.rows
        return self.joined[start : start + 4 * self.size.tokens].view(torch.float32)

    @property
    def failed(self) -> Tensor:  # [rows] bool
        return self.joined[len(self.joined) - self.size.rows :].view(torch.bool)

    def on_host(self) -> "_Results":
        return _Results(joined=to_host(self.joined), size=self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    replay: Callable[[], None]
    results: _Results


class GatherEnding:
    def __init__(
        self,
        model: Transformer,
        head: DeviceGather,  # the model's
        mixed: Tensor,  # [room, query_heads * head_dim], the result of the last attention
        residual: Tensor,  # [room, hidden]
        inputs: Tensor,  # [head_entries] int32
    ) -> None:
        self._model = model
        self._head = head
        self._mixed = mixed
        self._residual = residual
        self._inputs = inputs
        self._endings: dict[EndingSize, _Ending] = {}

    @torch.inference_mode()
    def capture(self, sizes: Sequence[EndingSize], capture: Capture) -> Iterator[EndingSize]:
        """Yields each that is done."""
        largest = max(sizes)
        self._inputs.zero_()
        for size in sorted(sizes, reverse=True):
            results = _Results.new(size, self._inputs.device)
            parts = _Head.of(self._inputs, largest, size)
            replay = capture(partial(self._work, parts, results))
            self._endings[size] = _Ending(replay=replay, results=results)
            yield size

    def size(self, step: Step, readout: Readout) -> EndingSize | None:
        """None: the step reads more than any size holds, or something else."""
        if len(readout.gathered) < len(readout.rows) or len(step.samples.rows):
            return None
        if len(step.classify_rows) or not len(readout.rows):
            return None
        rows = max(len(readout.rows), len(readout.gather_rows))
        tokens = len(step.gathers.ids)
        sizes = [s for s in self._endings if s.rows >= rows and s.tokens >= tokens]
        return min(sizes, default=None)

    def fill(self, size: EndingSize, step: Step, readout: Readout, head: NDArray[np.int32]) -> None:
        parts = _Head.of(head, max(self._endings), size)
        values: tuple[NDArray[np.integer], ...] = (
            *(readout.rows, readout.gather_rows, readout.id_rows),
            step.gathers.ids,
        )
        for part, some in zip(parts, values, strict=True):
            part[: len(some)] = some
            part[len(some) :] = 0

    def run(self, size: EndingSize, step: Step, readout: Readout) -> Scores:
        """Complete once an event that is recorded after this call has passed."""
        ending = self._endings[size]
        ending.replay()
        found = ending.results.on_host()
        return Scores(
            gather_logprobs=found.logprobs[: len(step.gathers.ids)],
            gather_argmax=found.argmax[: len(readout.gather_rows)],
            class_scores=torch.empty(0, 0),
            failed_gathered=found.failed[: len(readout.rows)],
            failed_classified=torch.empty(0, dtype=torch.bool),
            draws=[],
        )

    def _work(self, parts: _Head, results: _Results) -> None:
        mixed = self._mixed.index_select(0, parts.keep)
        residual = self._residual.index_select(0, parts.keep)
        hidden = self._model.end(mixed, residual)
        found = self._head.gather_at(hidden, parts.token_rows, parts.tokens)
        results.logprobs.copy_(found.logprobs)
        results.argmax.copy_(found.argmax.index_select(0, parts.gather_rows))
        results.failed.copy_(found.failed)
