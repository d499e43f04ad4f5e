"""One sequence of tokens, read in different ways: as an item, in chunks, or token by token."""

from collections.abc import Sequence

import numpy as np
import torch
from tests.kernels.forests import Inputs
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32

PAGE = 16


class Sequences:
    """Tokens with a query, a key and a value each."""

    def __init__(
        self, shape: HeadShape, *, seed: int, lengths: Sequence[int], dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._shape = shape

        def tokens(heads: int) -> list[Tensor]:
            size = (heads, shape.head_dim)
            return [torch.randn(n, *size, generator=generator).to(dtype) for n in lengths]

        self._q = tokens(shape.query_heads)
        self._k = tokens(shape.kv_heads)
        self._v = tokens(shape.kv_heads)

    def inputs(
        self,
        which: int,
        context: int,
        parts: Sequence[tuple[int, bool]],  # where each ends, and whether it is an item
        *,
        neighbour: int | None,
    ) -> Inputs:
        """The tokens from `context` on as rows, a part a segment; each part has its own pages.

        A neighbour is another sequence, whole, after these.
        """
        builder = _Builder(self._shape)
        start = context
        for end, is_item in parts:
            self._add(builder, which, start, end, is_item)
            start = end
        if neighbour is not None:
            self._add(builder, neighbour, 0, len(self._q[neighbour]), False)
        return builder.inputs()

    def _add(self, to: "_Builder", which: int, start: int, end: int, is_item: bool) -> None:
        stored = start if is_item else end
        kv = self._k[which], self._v[which]
        to.add_node(*(part[:stored] for part in kv))
        q, k, v = (part[which][start:end] for part in (self._q, self._k, self._v))
        to.add_segment(q, k, v, is_item)


class _Builder:
    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._tokens: list[int] = []
        self._pages: list[int] = [0]
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._items: list[bool] = []

    def add_node(self, k: Tensor, v: Tensor) -> None:
        pages = -(-len(k) // PAGE)
        for tensor, into in ((k, self._k), (v, self._v)):
            room = torch.full((pages * PAGE, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
            room[: len(tensor)] = tensor
            into.append(room.view(pages, PAGE, *tensor.shape[1:]))
        self._tokens.append(len(k))
        self._pages.append(pages)

    def add_segment(self, q: Tensor, k: Tensor, v: Tensor, is_item: bool) -> None:
        self._rows.append((q, k, v))
        self._items.append(is_item)

    def inputs(self) -> Inputs:
        nodes = len(self._tokens)
        indptr = np.cumsum(self._pages)
        layout = AttentionLayout(
            page_size=PAGE,
            node_parent=np.full(nodes, -1, np.int32),
            node_page_indptr=int32(indptr),
            node_pages=np.arange(indptr[-1], dtype=np.int32),
            node_tokens=int32(self._tokens),
            segment_indptr=int32(np.cumsum([0, *(len(q) for q, _, _ in self._rows)])),
            segment_node=np.arange(nodes, dtype=np.int32),
            segment_is_item=np.array(self._items, np.bool_),
        )
        q, k, v = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        kv = LayerKV(torch.cat(self._k), torch.cat(self._v), k, v)
        return Inputs(layout=layout, shape=self._shape, q=q, kv=kv)
