"""One attention call as the device runs it every layer: index tensors and masks, made once."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import HeadShape, Int32
from stemserve.kernels.page_format import from_pages
from stemserve.kernels.torch_paths.block_attention import attend
from stemserve.kernels.torch_paths.calls import Call, OwnRows, PaddedTokens, PageTokens


class FlatKV(NamedTuple):
    """A layer's pages as one run of slots, and the step's own rows."""

    k_slots: Tensor  # [slots, kv_heads, head_dim]
    v_slots: Tensor
    k_rows: Tensor  # [rows, kv_heads, head_dim]
    v_rows: Tensor

    @classmethod
    def of_layer(cls, kv: LayerKV) -> "FlatKV":
        slots = (-1, *kv.k_pages.shape[2:])
        return cls(kv.k_pages.view(slots), kv.v_pages.view(slots), kv.k_rows, kv.v_rows)

    def stored(self, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some slots, as numbers of the rows' kind."""
        if isinstance(slots, slice):
            k, v = self.k_slots[slots], self.v_slots[slots]
        else:
            k, v = self.k_slots.index_select(0, slots), self.v_slots.index_select(0, slots)
        return from_pages(k, self.k_rows.dtype), from_pages(v, self.v_rows.dtype)


class KeySource(Protocol):
    def fetch(self, kv: FlatKV) -> tuple[Tensor, Tensor]:  # [sequences, tokens, heads, head_dim]
        ...


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Consecutive slots, shared by all sequences: a view."""

    start: int
    stop: int
    sequences: int

    def fetch(self, kv: FlatKV) -> tuple[Tensor, Tensor]:
        k, v = kv.stored(slice(self.start, self.stop))
        return k.expand(self.sequences, -1, -1, -1), v.expand(self.sequences, -1, -1, -1)


@dataclass(frozen=True, slots=True)
class SlotList:
    """Scattered slots, shared by all sequences: copied once."""

    slots: Tensor  # [tokens]
    sequences: int

    def fetch(self, kv: FlatKV) -> tuple[Tensor, Tensor]:
        k, v = kv.stored(self.slots)
        return k.expand(self.sequences, -1, -1, -1), v.expand(self.sequences, -1, -1, -1)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """A padded list of slots for each sequence: copied side by side."""

    slots: Tensor  # [sequences * tokens]
    shape: tuple[int, int]

    def fetch(self, kv: FlatKV) -> tuple[Tensor, Tensor]:
        k, v = kv.stored(self.slots)
        return k.view(*self.shape, *k.shape[1:]), v.view(*self.shape, *v.shape[1:])


@dataclass(frozen=True, slots=True)
class RowRange:
    start: int
    shape: tuple[int, int]

    def fetch(self, kv: FlatKV) -> tuple[Tensor, Tensor]:
        stop = self.start + self.shape[0] * self.shape[1]
        k, v = kv.k_rows[self.start : stop], kv.v_rows[self.start : stop]
        return k.view(*self.shape, *k.shape[1:]), v.view(*self.shape, *v.shape[1:])


@dataclass(frozen=True, slots=True)
class RowTable:
    rows: Tensor  # [sequences * tokens]
    shape: tuple[int, int]

    def fetch(self, kv: FlatKV) -> tuple[Tensor, Tensor]:
        k, v = kv.k_rows.index_select(0, self.rows), kv.v_rows.index_select(0, self.rows)
        return k.view(*self.shape, *k.shape[1:]), v.view(*self.shape, *v.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCall:
    source: KeySource
    causal: bool
    mask: Tensor | None  # [sequences or 1, 1, rows or 1, tokens]
    sequences: int
    rows: slice  # of q, where the call is dense
    target_rows: slice  # of the stage's part, where the call is dense
    query_rows: Tensor | None  # [sequences * padded rows] rows of q; None: dense
    target: Tensor | None  # [sequences * padded rows] rows of the stage's part; None: dense

    def attend(self, q: Tensor, kv: FlatKV, shape: HeadShape) -> AttentionState:
        """[sequences * padded rows, heads, head_dim] and [sequences * padded rows, heads]"""
        rows = q[self.rows] if self.query_rows is None else q.index_select(0, self.query_rows)
        k, v = self.source.fetch(kv)
        batch = rows.view(self.sequences, -1, *rows.shape[1:])
        out, lse = attend(batch, k, v, shape, causal=self.causal, mask=self.mask)
        return AttentionState(out.flatten(0, 1), lse.flatten(0, 1))


def device_call(call: Call, part_start: int, part_stop: int, device: torch.device) -> DeviceCall:
    """The call, whose results go to a part that holds the rows `part_start` .. `part_stop`."""
    dense = call.is_dense
    start, target_start = int(call.row_start[0]), int(call.targets[0]) - part_start
    rows = call.sequences * call.padded_rows
    query_rows, target = (None, None) if dense else _row_tables(call, part_start, part_stop)
    return DeviceCall(
        source=_key_source(call, device),
        causal=call.causal,
        mask=_mask(call, device),
        sequences=call.sequences,
        rows=slice(start, start + rows),
        target_rows=slice(target_start, target_start + rows),
        query_rows=None if query_rows is None else index_tensor(query_rows, device),
        target=None if target is None else index_tensor(target, device),
    )


def _row_tables(call: Call, part_start: int, part_stop: int) -> tuple[Int32, Int32]:
    """Padding reads the first row of its sequence and is written past the part's rows."""
    place = np.arange(call.padded_rows, dtype=np.int32)
    real = place < call.rows[:, None]
    rows = call.row_start[:, None] + np.where(real, place, 0)
    target = np.where(real, call.targets[:, None] + place, part_stop) - part_start
    return rows.astype(np.int32).ravel(), target.astype(np.int32).ravel()


def _key_source(call: Call, device: torch.device) -> KeySource:
    tokens = call.tokens
    match tokens:
        case PageTokens():
            return page_source(tokens, call.sequences, device)
        case PaddedTokens():
            slots = index_tensor(tokens.slots.ravel(), device)
            return SlotTable(slots, (call.sequences, tokens.tokens))
        case OwnRows():
            return _own_rows(call, tokens, device)


def page_source(tokens: PageTokens, sequences: int, device: torch.device) -> KeySource:
    first = tokens.first_slot
    if first is not None:
        return SlotRange(first, first + tokens.tokens, sequences)
    return SlotList(index_tensor(tokens.slots(), device), sequences)


def _own_rows(call: Call, tokens: OwnRows, device: torch.device) -> KeySource:
    shape = (call.sequences, tokens.tokens)
    starts = tokens.first[0] + tokens.tokens * np.arange(call.sequences)
    if (call.rows == tokens.tokens).all() and np.array_equal(tokens.first, starts):
        return RowRange(int(tokens.first[0]), shape)
    place = np.arange(tokens.tokens, dtype=np.int32)
    rows = tokens.first[:, None] + np.where(place < call.rows[:, None], place, 0)
    return RowTable(index_tensor(rows.ravel(), device), shape)


def _mask(call: Call, device: torch.device) -> Tensor | None:
    if call.visible is not None:
        shown = np.arange(call.tokens.tokens) < call.visible[:, None]
        return _additive(shown[None, None], device)
    if isinstance(call.tokens, PaddedTokens):
        if (call.tokens.counts == call.tokens.tokens).all():
            return None
        shown = np.arange(call.tokens.tokens) < call.tokens.counts[:, None]
        return _additive(shown[:, None, None], device)
    return None


def _additive(
    shown: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], device: torch.device
) -> Tensor:
    return device_tensor(np.where(shown, np.float32(0), np.float32(-np.inf)), device)
