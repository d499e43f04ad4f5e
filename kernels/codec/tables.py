"""The device tables of a tree-decode plan: one buffer, one copy, small writes as leaves grow."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.codec.host_tables import (
    Capacity,
    HostTables,
    section_starts,
    table_size,
    with_room,
)
from stemserve.kernels.codec.pieces import RECORD
from stemserve.kernels.codec.tiles import PAGE_BITS, STEP_TOKENS
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import AttentionLayout, Int32


@dataclass(kw_only=True)
class DeviceTables:
    """Views of one int32 buffer on the device, and what is in it."""

    capacity: Capacity
    buffer: Tensor  # [table_size(capacity)]
    rows: Tensor  # [rows]
    records: Tensor  # [records, RECORD + 2 * pages a step]
    words: Tensor  # [pages]
    masks: Tensor  # [pages]
    merge_count: Tensor  # [rows]
    merge: Tensor  # [rows, columns]
    positions: Tensor  # [pages] with a window
    starts: Tensor  # [rows] with a window
    host: HostTables
    roomy: bool = False  # rows have fewer partial results than there are columns
    _growth: "_Growth | None" = field(default=None, repr=False)

    @classmethod
    def make(cls, host: HostTables, device: torch.device) -> "DeviceTables":
        capacity = with_room(host.size)
        size = table_size(capacity, host.records.shape[1])
        buffer = torch.empty(size, dtype=torch.int32, device=device)
        tables = cls.at(buffer, capacity, host)
        tables.fill(host)
        return tables

    @classmethod
    def at(
        cls, buffer: Tensor, capacity: Capacity, host: HostTables, *, roomy: bool = False
    ) -> "DeviceTables":
        """In a buffer of `table_size` entries, which somebody else fills."""
        width = host.records.shape[1]
        rows, record, merge_count, merge, positions, starts, words, masks = (
            buffer[a:b] for a, b in pairwise(section_starts(capacity, width))
        )
        return cls(
            capacity=capacity,
            buffer=buffer,
            rows=rows,
            records=record[: capacity.records * width].view(-1, width),
            words=words,
            masks=masks,
            merge_count=merge_count,
            merge=merge[: capacity.rows * capacity.columns].view(-1, capacity.columns),
            positions=positions,
            starts=starts,
            host=host,
            roomy=roomy,
        )

    def fill(self, host: HostTables) -> None:
        """Copy the tables of a plan that fits; the copy is ordered on the current stream."""
        staged = torch.empty(len(self.buffer), dtype=torch.int32, pin_memory=self.buffer.is_cuda)
        host.sections.pack(self.capacity, staged.numpy())
        self.buffer.copy_(staged, non_blocking=True)
        self.host = host
        self._growth = None

    def grow(self, layout: AttentionLayout) -> bool:
        """Take over longer last pages of the leaves; False if anything else differs."""
        if self.capacity.windowed or not _same_pages(self.host.layout, layout):
            return False
        if self._growth is None:
            self._growth = _growth(self)
        growth = self._growth
        tokens = layout.node_tokens[growth.node] - growth.before
        words = growth.words + (tokens << PAGE_BITS)
        masks = growth.masks + (tokens << 16)
        values = np.concatenate([words, masks, words[growth.copied], masks[growth.copied]])
        grown = device_tensor(values.astype(np.int32), self.buffer.device)
        self.buffer.scatter_(0, growth.index, grown)
        return True


def _same_pages(old: AttentionLayout, new: AttentionLayout) -> bool:
    """Whether only the tokens in last pages differ, and none has fewer."""
    return (
        old.page_size == new.page_size
        and np.array_equal(old.node_parent, new.node_parent)
        and np.array_equal(old.node_page_indptr, new.node_page_indptr)
        and np.array_equal(old.node_pages, new.node_pages)
        and np.array_equal(old.segment_indptr, new.segment_indptr)
        and np.array_equal(old.segment_node, new.segment_node)
        and bool((old.segment_rows == 1).all())
        and not (old.segment_is_item.any() or new.segment_is_item.any())
        and bool((new.node_tokens >= old.node_tokens).all())
        and bool((-(-new.node_tokens // new.page_size) == np.diff(new.node_page_indptr)).all())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    """The pages that are not full, and every place of the buffer that repeats them."""

    node: Int32  # [tails]
    before: Int32  # [tails] tokens of the node when the plan was made
    words: Int32  # [tails]
    masks: Int32  # [tails]
    copied: NDArray[np.intp]  # tails that piece records repeat
    index: Tensor  # int64, where words, masks and the copies of both are


def _growth(tables: DeviceTables) -> _Growth:
    host = tables.host
    streams, layout = host.streams, host.layout
    tails = np.flatnonzero(layout.node_tokens[streams.run_node] % layout.page_size)
    at = streams.run_page[tails] + streams.run_pages[tails] - 1
    tail_of = np.full(len(streams.words), -1, np.int64)
    tail_of[at] = np.arange(len(at))
    per_step = STEP_TOKENS // layout.page_size
    live = np.flatnonzero(host.records[:, 2])
    shown = host.records[live, 3][:, None] * per_step + np.arange(per_step)
    tail = tail_of[shown]
    record, place = np.nonzero(tail >= 0)
    inside = live[record] * host.records.shape[1] + RECORD + place
    base = [
        (section.data_ptr() - tables.buffer.data_ptr()) // 4
        for section in (tables.words, tables.masks, tables.records)
    ]
    index = np.concatenate(
        [base[0] + at, base[1] + at, base[2] + inside, base[2] + inside + per_step]
    )
    return _Growth(
        node=streams.run_node[tails],
        before=layout.node_tokens[streams.run_node[tails]],
        words=streams.words[at],
        masks=streams.masks[at],
        copied=tail[record, place],
        index=index_tensor(index, tables.buffer.device),
    )
