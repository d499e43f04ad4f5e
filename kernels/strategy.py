"""The surface that every attention strategy has, and the names of the strategies."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout, Int32

Int64 = NDArray[np.int64]

TORCH = "torch"  # the engine of the plain torch paths

_NONE = np.empty(0, np.int32)


class Phase(StrEnum):
    PREFILL = "prefill"  # segments of any length, stored or items
    DECODE = "decode"  # stored segments of one row


class Kernel(StrEnum):
    NAIVE = "naive"
    SPLIT = "split"
    RAGGED = "ragged"
    CASCADE = "cascade"
    MULTI_ITEM = "multi_item"
    CUSTOM_MASK = "custom_mask"
    PAGED = "paged"
    CODEC = "codec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Blocks that one engine computes: of query rows that each read a run of KV tokens.

    An engine is a primitive that a cost table prices, by any name. On a GPU a part is what runs at
    once: one call of the engine, with whatever kernels it launches; calls that follow each other
    are parts of their own. A block has rows and tokens, of all heads:

    * `torch`: a sequence of a batched call, padding included; a part may have many calls.
    * batched attention, such as `fa2`, `fa3`, `cudnn`: a request of the batch. Where the engine
      skips tokens by a mask (multi-item), a tile of query rows and the tokens that it reads.
    * `dense`: a tile of rows, and the tokens of the blocks that it reads.
    * `tree`: a piece of a tile's page stream, and the rows of the tile that it serves.
    * `gather`, a copy of K and V: no rows, the tokens copied. `merge` of partial results: the rows
      merged, once each part that they have; no tokens.

    Engines of one kernel that cost differently have different names: causal and full attention of a
    library with two kernels, two tile shapes.
    """

    engine: str
    rows: Int32  # [blocks] query rows (one per token) of each block
    kv_tokens: Int32  # [blocks] KV tokens that the block reads
    causal: bool = False  # the last row of a block sees all its tokens, each row before one less
    launches: int = 1  # calls of the engine by the host
    tokens_once: int | None = None  # where blocks are tiles that share reads: each token once

    @property
    def kv_tokens_read(self) -> int:
        if self.tokens_once is not None:
            return self.tokens_once
        return int(self.kv_tokens.sum(dtype=np.int64))

    @property
    def pairs(self) -> Int64:  # [blocks] of a row and a token that it sees
        rows, tokens = self.rows.astype(np.int64), self.kv_tokens.astype(np.int64)
        if not self.causal:
            return rows * tokens
        seeing = np.minimum(rows, tokens)  # rows before these see nothing
        seen: Int64 = seeing * tokens - seeing * (seeing - 1) // 2
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a plan makes the device do in one layer, part by part.

    The cost model prices it and the byte counters read it; a plan's work is the work that its `run`
    does, not a model beside it.
    """

    parts: tuple[Part, ...]

    @property
    def rows(self) -> Int32:  # [blocks] of all parts
        return np.concatenate([_NONE, *(part.rows for part in self.parts)])

    @property
    def kv_tokens(self) -> Int32:  # [blocks] of all parts
        return np.concatenate([_NONE, *(part.kv_tokens for part in self.parts)])

    @property
    def launches(self) -> int:
        return sum(part.launches for part in self.parts)

    @property
    def kv_tokens_read(self) -> int:
        return sum(part.kv_tokens_read for part in self.parts)


@runtime_checkable
class CountsFallbacks(Protocol):
    """A strategy that has a faster and a slower way to launch the same."""

    fallbacks: Counter[str]  # launches in the slower way, by reason; strategies may share one


class LayerKVs(Protocol):
    def __call__(self, layer: int) -> LayerKV: ...


@runtime_checkable
class PlacesResults(Protocol):
    """A strategy whose results need no copy to where they are wanted."""

    def bound(self, plan: Any, q: Tensor, kv: LayerKVs, out: Tensor) -> Callable[[int], None]:
        """What runs a layer, by its number, on tensors that all layers share but for their pages.

        As `run`, with the result in the first rows of `out`: [room, query_heads, head_dim],
        contiguous, with room for all rows of q. What is behind them may be overwritten. For one
        stream, and as long as the tensors last.
        """
        ...


@runtime_checkable
class CompilesAhead(Protocol):
    """A strategy with kernels that only some layouts need."""

    def compile_ahead(self) -> None:
        """Those that are compiled at first use: while a call waits, each takes half a second."""
        ...


class Strategy(Protocol):
    """One way to compute the attention of a group.

    A refused layout must not be planned. Ranges are checked where a layout is made, not here.
    """

    kernel: Kernel
    phase: Phase

    def refusal(self, layout: AttentionLayout) -> str | None:
        """Why this strategy cannot run the layout, or None if it can."""
        ...

    def work(self, layout: AttentionLayout) -> Work:
        """The work of `plan(layout)`, without making device data."""
        ...

    def plan(self, layout: AttentionLayout) -> Any:
        """Host work, once a step: everything that depends on the layout. A plan has its `work`."""
        ...

    def run(self, plan: Any, q: Tensor, kv: LayerKV) -> AttentionState:
        """Device work, once a layer; neither syncs nor plans.

        q: [rows, query_heads, head_dim]; `out` has its shape and dtype. `lse` is float32, a
        natural logarithm. A row that sees nothing has out 0 and lse -inf.
        """
        ...
