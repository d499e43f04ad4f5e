"""What FlashInfer computes from a batch's tables, in float64: its masks, spelt out."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.flashinfer_paths.prefill_batch import BatchTables, PrefillBatch
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.token_sources import EMPTY

Int = NDArray[np.integer]


def read_tables(tables: BatchTables, q: Tensor, kv: LayerKV, shape: HeadShape) -> AttentionState:
    """Rows in the layout's order; rows that see nothing are NaN unless the tables name them."""
    batch = tables.batch
    order = torch.arange(len(q)) if tables.row_order is None else _index(tables.row_order)
    out = torch.full(q.shape, torch.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float64)
    keys, values = _tokens(tables, kv)
    for request in range(batch.requests):
        if not batch.kv_tokens[request]:
            continue
        rows = order[int(batch.row_indptr[request]) : int(batch.row_indptr[request + 1])]
        slots = _index(request_slots(batch, request))
        mask = request_mask(batch, request)
        state = reference.masked_attention(q[rows], keys[slots], values[slots], mask, shape)
        out[rows], lse[rows] = state.out, state.lse
    empty = _index(tables.empty_rows)
    out[empty], lse[empty] = 0.0, -torch.inf
    return AttentionState(out, lse)


def request_slots(
    batch: PrefillBatch, request: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.integer]]:
    start, stop = (int(i) for i in batch.kv_indptr[request : request + 2])
    if batch.pages is None:
        return np.arange(start, stop)
    slots = batch.pages[start:stop, None] * batch.page_size + np.arange(batch.page_size)
    held = (stop - start - 1) * batch.page_size + int(batch.last_page_tokens[request])
    assert held == batch.kv_tokens[request]
    return slots.ravel()[:held]


def request_mask(batch: PrefillBatch, request: int) -> Tensor:  # [rows, tokens]
    rows, tokens = int(batch.rows[request]), int(batch.kv_tokens[request])
    if batch.mask is not None:
        return torch.tensor(batch.mask.unpack(request).tolist()).view(rows, tokens)
    place = torch.arange(rows).unsqueeze(1) + tokens - rows
    token = torch.arange(tokens)
    mask = token <= place
    if batch.items is not None:
        prefix = int(batch.items.prefix_tokens[request])
        places = batch.items.places[request].astype(np.int64)
        assert batch.items.longest_item[request] == places.max(initial=0)
        first = tokens - rows
        at = [int(places[i - prefix]) if i >= prefix else i + 1 for i in range(first, first + rows)]
        mask &= (token < prefix) | (token > place - torch.tensor(at).unsqueeze(1))
    return mask if batch.causal else torch.ones_like(mask)


def _tokens(tables: BatchTables, kv: LayerKV) -> tuple[Tensor, Tensor]:
    k, v = kv.k_pages.flatten(0, 1).double(), kv.v_pages.flatten(0, 1).double()
    if tables.sources is None:
        return k, v
    source = tables.sources.astype(np.int64)
    is_row = torch.tensor(((source < 0) & (source > EMPTY)).tolist(), dtype=torch.bool)
    pool = _index(np.maximum(source, 0))
    row = _index(np.where((source < 0) & (source > EMPTY), -1 - source, 0))
    empty = torch.tensor((source == EMPTY).tolist(), dtype=torch.bool)[:, None, None]
    own = is_row[:, None, None]
    k, v = (
        torch.where(own, kv.k_rows.double()[row], k[pool]),
        torch.where(own, kv.v_rows.double()[row], v[pool]),
    )
    return k.masked_fill(empty, torch.nan), v.masked_fill(empty, torch.nan)


def _index(values: Int) -> Tensor:
    return torch.tensor(values.tolist(), dtype=torch.int64)
