"""Counts what the attention kernel reads while it runs, whatever the plans say."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.strategy import Work

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GATHER = torch.ops.aten.index_select.default


class ReadCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`blocks` are (query rows, KV tokens) of every sequence that a kernel call attends."""

    def __init__(self, shape: HeadShape, k_pages: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = shape
        self._pool = k_pages.untyped_storage().data_ptr()
        self.blocks: list[tuple[int, int]] = []
        self.calls = 0
        self.gathers = 0
        self.tokens_gathered = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is FLASH:
            q, k = args[0], args[1]  # [batch, heads, rows, head_dim]
            rows = q.shape[1] * q.shape[2] // self._shape.query_heads
            self.calls += 1
            self.blocks += [(rows, k.shape[2])] * k.shape[0]
        if func is GATHER and args[0].untyped_storage().data_ptr() == self._pool:
            self.gathers += 1
            self.tokens_gathered += len(args[2])
        return func(*args, **(kwargs or {}))


def work_blocks(work: Work) -> list[tuple[int, int]]:
    return sorted(zip(work.rows.tolist(), work.kv_tokens.tolist(), strict=True))
