"""torch's FlexAttention as a tree-decode peer, with a block mask built by hand.

The pool of pages is the key sequence, in place: a slot's row range stands in two small tables, and
the mask compares. All rows are one tile of the decoding kernel, so shared pages are read once.
Trees of more rows than a tile would be read once a query head, without any split: left out.
"""

from typing import Any

import numpy as np
import torch
from decode_engines import Call, CannotRun, Engine
from kernel_trees import Case, node_slots

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import Int32

MOST_ROWS = 127  # of a KV head that the decoding kernel takes
ROW_SIZES = (64, 96, 127)  # padded to these, so that few shapes are compiled
KEY_BLOCK = 128


def flex_peer() -> Engine:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention)  # sizes that change become dynamic, heads stay
    return Engine(name="flex", prepare=lambda case, q: _flex(case, q, compiled))


def row_ranges(case: Case) -> tuple[Int32, Int32]:
    """First row that sees each slot of the pool, and the one after the last; empty: nobody."""
    slots = len(case.layout.node_pages) * case.layout.page_size
    low, high = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    below: list[list[int]] = [[] for _ in case.nodes]
    for row, leaf in enumerate(case.leaves):
        for node in case.layout.chain(leaf):
            below[node].append(row)
    for node, rows in enumerate(below):
        if rows:
            seen = node_slots(case.layout, node)
            low[seen], high[seen] = rows[0], rows[-1] + 1
    return low, high


def _flex(case: Case, q: torch.Tensor, compiled: Any) -> Call:
    shape = case.shape
    rows = len(q) * shape.group
    if rows > MOST_ROWS:
        raise CannotRun(f"{rows} rows a KV head, one tile has {MOST_ROWS}")
    padded = next(size for size in ROW_SIZES if size >= rows)
    packed = q.new_zeros(1, shape.kv_heads, padded, shape.head_dim)
    packed[0, :, :rows] = (
        q.view(len(q), shape.kv_heads, -1, shape.head_dim).transpose(0, 1).flatten(1, 2)
    )
    mask = _block_mask(case, padded)

    def call(kv: LayerKV) -> torch.Tensor:
        keys, values = (
            pages.flatten(0, 1).transpose(0, 1).unsqueeze(0) for pages in (kv.k_pages, kv.v_pages)
        )
        out: torch.Tensor = compiled(packed, keys, values, block_mask=mask, scale=shape.scale)[
            0, :, :rows
        ]
        heads = out.reshape(shape.kv_heads, len(q), shape.group, shape.head_dim)
        return heads.transpose(0, 1).flatten(1, 2)

    return call


def _block_mask(case: Case, rows: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    low, high = (torch.from_numpy(table).cuda() for table in row_ranges(case))
    group = case.shape.group

    def sees(batch: Any, head: Any, row: Any, slot: Any) -> Any:
        request = row // group
        return (low[slot] <= request) & (request < high[slot])

    blocks = -(-len(low) // KEY_BLOCK)
    return BlockMask.from_kv_blocks(
        torch.full((1, 1, 1), blocks, dtype=torch.int32, device="cuda"),
        torch.arange(blocks, dtype=torch.int32, device="cuda").view(1, 1, 1, -1),
        BLOCK_SIZE=(128, KEY_BLOCK),
        mask_mod=sees,
        seq_lengths=(rows, len(low)),
    )
