"""Query, key and value heads out of the packed projection on a CUDA device: one launch.

Norm of each query and key head, rotary embedding, and the write of keys and values to pages.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stemserve.kernels.fused import layer_triton
from stemserve.kernels.fused.heads import Heads
from stemserve.kernels.fused.norm import power_of_2
from stemserve.kernels.fused.parts import Parts, parts_of
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.overlap import overlap

KERNELS: Any = layer_triton  # untyped: device code
HEADS_AT_ONCE = 16
PAGE_DTYPES = (torch.float8_e4m3fn,)  # beside that of the projection


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """What happens to the query and key heads, the same in all layers but for `norm`."""

    shape: HeadShape
    table: Tensor  # [positions, 2, head_dim / 2] float32, contiguous: cosines, then sines
    eps: float
    dtype: torch.dtype | None = None  # of the heads; None: that of the projection

    def __post_init__(self) -> None:
        if not self.table.is_contiguous():
            raise ValueError("the table of cosines and sines must be contiguous")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTarget:
    """Where the keys and values of a layer's rows are kept.

    With `indptr` a row may have any number of places, as a token in a page that several sequences
    continue has: those of row r are slots[indptr[r]:indptr[r + 1]].
    """

    k_pages: Tensor  # [pages, page_size, kv_heads, head_dim], contiguous; float8_e4m3fn or q's type
    v_pages: Tensor
    slots: Tensor  # [rows], or [indptr[-1]], int32: page * page_size + place; -1: not stored
    indptr: Tensor | None = None  # [rows + 1] int32
    k_scale: float = 1.0  # of float8 pages: a stored number is the true one over its scale
    v_scale: float = 1.0


def split_heads(
    qkv: Tensor,  # [rows, (query_heads + 2 * kv_heads) * head_dim], rows may be strided; or parts
    positions: Tensor,  # [rows] int32 or int64, below the table's length
    norm: Tensor | None,  # [query_heads + kv_heads, head_dim] gains, contiguous
    transform: HeadTransform,
    target: PageTarget | None,
    into: Heads | None = None,  # contiguous, of the projection's type; None: new ones
) -> Heads:
    shape, rows = transform.shape, qkv.shape[-2]
    parts = parts_of(qkv)
    heads = into or _empty_heads(qkv, rows, transform)
    _check(parts, heads, transform, target)
    if not rows:
        return heads
    half = shape.head_dim // 2
    all_heads = shape.query_heads + 2 * shape.kv_heads
    block = min(HEADS_AT_ONCE, power_of_2(all_heads))
    pages = target or PageTarget(k_pages=heads.k, v_pages=heads.v, slots=positions)
    KERNELS.heads_kernel[(rows, -(-all_heads // block))](
        qkv,
        qkv if norm is None else norm,
        transform.table,
        positions,
        pages.slots if pages.indptr is None else pages.indptr,
        pages.slots,
        *heads,
        pages.k_pages,
        pages.v_pages,
        parts.row_stride,
        parts.part_stride,
        transform.eps,
        pages.k_scale,
        pages.v_scale,
        QUERY_HEADS=shape.query_heads,
        KV_HEADS=shape.kv_heads,
        HALF=half,
        HALF_PAD=power_of_2(half),
        BLOCK=block,
        NORM=norm is not None,
        STORE=target is not None,
        SEVERAL=pages.indptr is not None,
        FP8=pages.k_pages.dtype in PAGE_DTYPES,
        PARTS=parts.parts,
        num_warps=4,
        **overlap(qkv.device),
    )
    return heads


def _empty_heads(qkv: Tensor, rows: int, transform: HeadTransform) -> Heads:
    shape, dtype = transform.shape, transform.dtype or qkv.dtype
    kv = (rows, shape.kv_heads, shape.head_dim)
    return Heads(
        qkv.new_empty((rows, shape.query_heads, shape.head_dim), dtype=dtype),
        qkv.new_empty(kv, dtype=dtype),
        qkv.new_empty(kv, dtype=dtype),
    )


def _check(parts: Parts, heads: Heads, transform: HeadTransform, target: PageTarget | None) -> None:
    shape = transform.shape
    width = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    if parts.width != width:
        raise ValueError(f"a row of qkv must be {width} numbers, not {parts.width}")
    if target is None:
        return
    for pages in (target.k_pages, target.v_pages):
        if pages.dtype not in (heads.k.dtype, *PAGE_DTYPES) or not pages.is_contiguous():
            raise ValueError(f"pages must be contiguous and of {heads.k.dtype} or {PAGE_DTYPES}")
