"""Attention in torch whose bits depend, for each row, on its own place and keys only.

All products have one shape: 16 rows whose places in their sequences share all but the last four
bits, by 256 keys that share all but the last eight. A row always has the same place in its block,
and so has a key, whatever else is computed, stored or an item's. Blocks of keys follow each other
from the first token on; what a row does not see adds exact zeros.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.strategy import TORCH, Kernel, Part, Phase, Work
from stemserve.kernels.token_sources import indptr, token_slots

ROWS = 16
KEYS = 256
NO_SCORE = -1e30  # finite, so that a difference of two is no NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows of one segment, and the keys that the last of them sees."""

    slots: Tensor  # [stored] int64: tokens in the pages, from the first on
    first: int  # of q's rows
    rows: int
    place: int  # of the first row in its sequence; below 0: it sees nothing
    is_item: bool  # its rows are keys behind the stored ones

    @property
    def keys(self) -> int:
        return max(0, self.place + self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBlocksPlan:
    work: Work
    sequences: list[SequenceRows]


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
        slots = {
            node: index_tensor(token_slots(layout, int32(layout.chain(node))), self._device)
            for node in np.unique(layout.segment_node).tolist()
        }
        sequences = [
            SequenceRows(
                slots=slots[int(layout.segment_node[segment])],
                first=int(layout.segment_indptr[segment]),
                rows=int(rows),
                place=_first_place(layout, segment),
                is_item=bool(layout.segment_is_item[segment]),
            )
            for segment, rows in enumerate(layout.segment_rows.tolist())
            if rows
        ]
        return FixedBlocksPlan(work=self.work(layout), sequences=sequences)

    def run(self, plan: FixedBlocksPlan, q: Tensor, kv: LayerKV) -> AttentionState:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for sequence in plan.sequences:
            keys, values = (_blocks(sequence, *of) for of in zip(kv[:2], kv[2:], strict=True))
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
            visible = torch.zeros(ROWS, dtype=torch.int64, device=q.device)
            seen = torch.arange(place + 1, place + count + 1, device=q.device)
            visible[lane : lane + count] = seen
            found = self._attend(
                block, visible, *(part[: -(-(place + count) // KEYS)] for part in kv)
            )
            into.out[row : row + count] = found.out[lane : lane + count].to(q.dtype)
            into.lse[row : row + count] = found.lse[lane : lane + count]
            row, place = row + count, place + count

    def _attend(
        self,
        q: Tensor,  # [ROWS, query_heads, head_dim] float32
        visible: Tensor,  # [ROWS] keys that each row sees
        keys: Tensor,  # [blocks, kv_heads, KEYS, head_dim] float32
        values: Tensor,
    ) -> AttentionState:
        shape = self._shape
        folded = q.view(ROWS, shape.kv_heads, shape.group, -1).transpose(0, 1)
        folded = folded.reshape(shape.kv_heads, ROWS * shape.group, -1)
        visible = visible.repeat_interleave(shape.group)[None, :, None]
        number = torch.arange(KEYS, device=q.device)
        peak = torch.full((*folded.shape[:2], 1), NO_SCORE, device=q.device)
        total, out = torch.zeros_like(peak), torch.zeros_like(folded)
        for block, (k, v) in enumerate(zip(keys, values, strict=True)):
            scores = torch.bmm(folded, k.transpose(1, 2)) * shape.scale
            scores = scores.masked_fill(number + block * KEYS >= visible, -torch.inf)
            higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
            fade, weights = (peak - higher).exp(), (scores - higher).exp()
            total = total * fade + weights.sum(-1, keepdim=True)
            out = out * fade + torch.bmm(weights, v)
            peak = higher
        out = out / total.clamp_min(1e-30)
        lse = torch.where(total > 0, peak + total.log(), -torch.inf)
        heads = (shape.kv_heads, ROWS, shape.group, -1)
        return AttentionState(
            out.view(heads).transpose(0, 1).reshape(q.shape),
            lse.view(heads).transpose(0, 1).reshape(q.shape[:2]),
        )


def _first_place(layout: AttentionLayout, segment: int) -> int:
    chain = int(layout.chain_tokens[segment])
    if layout.segment_is_item[segment]:
        return chain
    return chain - int(layout.segment_rows[segment])


def _blocks(
    sequence: SequenceRows,
    pages: Tensor,  # [pages, page_size, kv_heads, head_dim]
    rows: Tensor,  # [rows, kv_heads, head_dim]
) -> Tensor:  # [blocks, kv_heads, KEYS, head_dim] float32, zeros behind the last key
    stored = len(sequence.slots)
    count = -(-sequence.keys // KEYS)
    tokens = pages.new_zeros((count * KEYS, *pages.shape[2:]), dtype=torch.float32)
    tokens[:stored] = pages.flatten(0, 1)[sequence.slots]
    if sequence.is_item:
        own = slice(sequence.first, sequence.first + sequence.rows)
        tokens[stored : stored + sequence.rows] = rows[own]
    return tokens.view(count, KEYS, *pages.shape[2:]).transpose(1, 2).contiguous()
