"""Attention in torch whose bits depend, for each row, on its own place and keys only.

All products have one shape: 8 rows whose places in their sequences share all but the last three
bits, by 256 keys that share all but the last eight. A row always has the same place in its block,
and so has a key, whatever else is computed, stored or an item's. Blocks of keys follow each other
from the first token on; what a row does not see adds exact zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape, Int32, int32
from stemserve.kernels.strategy import TORCH, Kernel, Part, Phase, Work
from stemserve.kernels.token_sources import EMPTY, indptr, row_sources, token_slots

ROWS = 8  # more are faster in prefill, fewer in decode, where all but one are empty
KEYS = 256
NO_SCORE = -1e30  # finite, so that a difference of two is no NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows of one segment."""

    first: int  # of q's rows
    rows: int
    place: int  # of the first row in its sequence; below 0: it sees nothing
    blocks: list[int]  # of keys, up to the last one that the last row sees


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlocks:
    """Where the keys of all blocks come from; sequences of one beginning share its blocks."""

    count: int
    stored_at: Tensor  # [stored] int64: places in the blocks
    slots: Tensor  # [stored] int64
    own_at: Tensor  # [own] int64
    rows: Tensor  # [own] int64

    def gather(
        self,
        pages: Tensor,  # [pages, page_size, kv_heads, head_dim]
        rows: Tensor,  # [rows, kv_heads, head_dim]
    ) -> Tensor:  # [blocks, kv_heads, KEYS, head_dim] float32, zeros behind the last key
        keys = pages.new_zeros((self.count * KEYS, *pages.shape[2:]), dtype=torch.float32)
        keys.index_copy_(0, self.stored_at, pages.flatten(0, 1)[self.slots].float())
        keys.index_copy_(0, self.own_at, rows[self.rows].float())
        return keys.view(self.count, KEYS, *pages.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBlocksPlan:
    work: Work
    sequences: list[SequenceRows]
    keys: KeyBlocks


class FixedBlocks:
    def __init__(self, shape: HeadShape, device: torch.device, phase: Phase) -> None:
        self.phase = phase
        # As these, each request reads its own chain.
        self.kernel = Kernel.RAGGED if phase is Phase.PREFILL else Kernel.PAGED
        self._shape = shape
        self._device = device

    def refusal(self, layout: AttentionLayout) -> str | None:
        return decode_refusal(layout) if self.phase is Phase.DECODE else None

    def work(self, layout: AttentionLayout) -> Work:
        """Every block of rows over all blocks of keys up to its last row."""
        kept = np.flatnonzero(layout.segment_rows > 0)
        rows = layout.segment_rows[kept]
        keys = layout.chain_tokens[kept] + rows * layout.segment_is_item[kept]
        blocks = -(-keys // ROWS) - np.maximum(0, keys - rows) // ROWS  # of rows
        of = np.repeat(np.arange(len(kept)), blocks)
        last = -(-keys // ROWS)[of] - (indptr(int32(blocks))[1:][of] - 1 - np.arange(len(of)))
        tokens = -(-np.minimum(last * ROWS, keys[of]) // KEYS) * KEYS
        part = Part(
            engine=TORCH,
            rows=np.full(len(of), ROWS, np.int32),
            kv_tokens=int32(tokens),
            launches=int(tokens.sum()) // KEYS,
        )
        return Work(parts=(part,))

    def plan(self, layout: AttentionLayout) -> FixedBlocksPlan:
        numbers: dict[bytes, int] = {}
        sequences = [
            SequenceRows(
                first=int(layout.segment_indptr[segment]),
                rows=rows,
                place=_first_place(layout, segment),
                blocks=[
                    numbers.setdefault(block.tobytes(), len(numbers))
                    for block in _key_sources(layout, segment)
                ],
            )
            for segment, rows in enumerate(layout.segment_rows.tolist())
            if rows
        ]
        sources = np.frombuffer(b"".join(numbers), np.int32)
        return FixedBlocksPlan(
            work=self.work(layout), sequences=sequences, keys=_key_blocks(sources, self._device)
        )

    def run(self, plan: FixedBlocksPlan, q: Tensor, kv: LayerKV) -> AttentionState:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        keys = plan.keys.gather(kv.k_pages, kv.k_rows)
        values = plan.keys.gather(kv.v_pages, kv.v_rows)
        for sequence in plan.sequences:
            self._run_sequence(sequence, q, (keys, values), AttentionState(out, lse))
        return AttentionState(out, lse)

    def _run_sequence(
        self,
        sequence: SequenceRows,
        q: Tensor,
        kv: tuple[Tensor, Tensor],  # [key blocks, kv_heads, KEYS, head_dim] float32
        into: AttentionState,
    ) -> None:
        skipped = max(0, -sequence.place)  # rows that see nothing
        place = sequence.place + skipped
        row, end = sequence.first + skipped, sequence.first + sequence.rows
        while row < end:
            lane = place % ROWS
            count = min(ROWS - lane, end - row)
            block = q.new_zeros((ROWS, *q.shape[1:]), dtype=torch.float32)
            block[lane : lane + count] = q[row : row + count]
            blocks = sequence.blocks[: -(-(place + count) // KEYS)]
            found = self._attend(block, place, *([part[b] for b in blocks] for part in kv))
            into.out[row : row + count] = found.out[lane : lane + count].to(q.dtype)
            into.lse[row : row + count] = found.lse[lane : lane + count]
            row, place = row + count, place + count

    def _attend(
        self,
        q: Tensor,  # [ROWS, query_heads, head_dim] float32
        place: int,  # of the first row that counts; the row of place p is row p % ROWS
        keys: Sequence[Tensor],  # of blocks [kv_heads, KEYS, head_dim] float32
        values: Sequence[Tensor],
    ) -> AttentionState:
        shape = self._shape
        folded = (q * shape.scale).view(ROWS, shape.kv_heads, shape.group, -1).transpose(0, 1)
        folded = folded.reshape(shape.kv_heads, ROWS * shape.group, -1)
        peak = torch.full((*folded.shape[:2], 1), NO_SCORE, device=q.device)
        total, out = torch.zeros_like(peak), torch.zeros_like(folded)
        for block, (k, v) in enumerate(zip(keys, values, strict=True)):
            scores = torch.bmm(folded, k.transpose(1, 2))
            if place + 1 < (block + 1) * KEYS:  # some row does not see all of it
                scores += self._mask(place, block * KEYS)
            higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
            fade, weights = (peak - higher).exp_(), scores.sub_(higher).exp_()
            total = total.mul_(fade).add_(weights.sum(-1, keepdim=True))
            out = torch.baddbmm(out.mul_(fade), weights, v)
            peak = higher
        out = out / total.clamp_min(1e-30)
        lse = torch.where(total > 0, peak + total.log(), -torch.inf)
        heads = (shape.kv_heads, ROWS, shape.group, -1)
        return AttentionState(
            out.view(heads).transpose(0, 1).reshape(q.shape),
            lse.view(heads).transpose(0, 1).reshape(q.shape[:2]),
        )

    def _mask(self, place: int, first_key: int) -> Tensor:  # [ROWS * group, KEYS]
        """-inf where a row does not see a key; rows before the one of `place` do not count."""
        rows = torch.arange(ROWS, device=self._device) + place // ROWS * ROWS
        keys = torch.arange(KEYS, device=self._device) + first_key
        hidden = torch.where(keys > rows[:, None], -torch.inf, 0.0)
        return hidden.repeat_interleave(self._shape.group, 0)


def _first_place(layout: AttentionLayout, segment: int) -> int:
    chain = int(layout.chain_tokens[segment])
    if layout.segment_is_item[segment]:
        return chain
    return chain - int(layout.segment_rows[segment])


def _key_sources(layout: AttentionLayout, segment: int) -> Int32:  # [blocks, KEYS]
    """As in token_sources.py."""
    chain = int32(layout.chain(int(layout.segment_node[segment])))
    rows = layout.segment_rows[segment : segment + 1] * layout.segment_is_item[segment]
    own = row_sources(layout.segment_indptr[segment : segment + 1], int32(rows))
    keys = np.concatenate([token_slots(layout, chain), own])
    blocks = -(-len(keys) // KEYS)
    sources = np.full(blocks * KEYS, EMPTY, np.int32)
    sources[: len(keys)] = keys
    return sources.reshape(blocks, KEYS)


def _key_blocks(sources: Int32, device: torch.device) -> KeyBlocks:
    stored, own = np.flatnonzero(sources >= 0), np.flatnonzero((sources < 0) & (sources > EMPTY))
    return KeyBlocks(
        count=len(sources) // KEYS,
        stored_at=index_tensor(stored, device),
        slots=index_tensor(sources[stored], device),
        own_at=index_tensor(own, device),
        rows=index_tensor(-1 - sources[own], device),
    )
