"""The surface that every attention strategy has, and the names of the strategies."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout, Int32


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
class Work:
    """What a plan makes the device do in one layer: blocks of rows that each read a run of tokens.

    The cost model prices it and the byte counters read it; a plan's work is the work that its `run`
    does, not a model beside it.
    """

    rows: Int32  # [blocks] query rows (one per token) of each block
    kv_tokens: Int32  # [blocks] KV tokens that the block reads
    launches: int  # device launches, or calls of a CPU kernel

    @property
    def kv_tokens_read(self) -> int:
        return int(self.kv_tokens.sum(dtype=np.int64))


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
