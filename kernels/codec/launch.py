"""Launches of the tree kernel and of the merge in Triton."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec import kernels_triton
from stemserve.kernels.codec.division import Division
from stemserve.kernels.codec.host_tables import COLUMN_STEP, FEWEST_COLUMNS
from stemserve.kernels.codec.launch_shape import LaunchShape, padded_dim, shape_of
from stemserve.kernels.codec.tables import DeviceTables
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.overlap import overlap

LOG2E = 1 / math.log(2)
KERNELS: Any = kernels_triton  # untyped: device code
FEW_MERGES = 1024  # rows times heads that leave most of a GPU idle
MOST_AT_ONCE = 40  # partial results that a program of the merge loads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNumbers:
    """Number formats and what the model adds to plain attention."""

    dtype: torch.dtype  # of q and the result
    soft_cap: float = 0.0  # 0: none
    window: int = 0  # tokens that a row sees, itself included; 0: all
    page_dtype: torch.dtype | None = None  # None: as q
    k_scale: float = 1.0  # of FP8 pages
    v_scale: float = 1.0

    @property
    def converts(self) -> bool:
        """Pages keep other numbers than rows have."""
        return self.page_dtype not in (None, self.dtype)


def launch_shape(shape: HeadShape, numbers: DecodeNumbers) -> LaunchShape:
    return shape_of(padded_dim(shape.head_dim) * numbers.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeVariant:
    """What a merge is compiled for."""

    heads: int  # of a program
    block: int  # partial results that it loads at once
    once: bool  # all of them


class TritonTree:
    def __init__(
        self, shape: HeadShape, numbers: DecodeNumbers, division: Division, bins: int
    ) -> None:
        self._shape = shape
        self._numbers = numbers
        self._division = division
        self._bins = bins
        self._padded_dim = padded_dim(shape.head_dim)
        self._launch = launch_shape(shape, numbers)

    def read_tree(
        self,
        tables: DeviceTables,
        partial: AttentionState,  # [kv_heads, partial_rows, head_dim], [kv_heads, partial_rows]
        q: Tensor,
        kv: LayerKV,
        target: AttentionState,
    ) -> None:
        numbers, shape = self._numbers, self._shape
        scale, cap_scale = shape.scale * numbers.k_scale * LOG2E, 0.0
        if numbers.soft_cap:
            scale, cap_scale = numbers.soft_cap * LOG2E, 2 * scale / numbers.soft_cap
        KERNELS.tree_kernel[(self._bins * shape.kv_heads,)](
            q,
            kv.k_pages,
            kv.v_pages,
            kv.k_rows,
            kv.v_rows,
            tables.records,
            tables.words,
            tables.masks,
            tables.positions,
            tables.starts,
            partial.out,
            partial.lse,
            target.out,
            target.lse,
            q.stride(0),
            kv.k_rows.stride(0),
            kv.v_rows.stride(0),
            partial.lse.shape[1],
            scale,
            cap_scale,
            numbers.v_scale,
            HEADS=shape.query_heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            DIM_PAD=self._padded_dim,
            PAGE=kv.k_pages.shape[1],
            STAGES=self._launch.stages,
            SOFT_CAP=numbers.soft_cap > 0,
            WINDOW=numbers.window > 0,
            HAS_ITEMS=self._has_items(tables, kv),
            WIDEN=numbers.dtype == torch.float32 or q.device.type == "cpu",
            num_warps=self._launch.warps,
            maxnreg=self._launch.registers,
            **overlap(q.device),
        )

    def _has_items(self, tables: DeviceTables, kv: LayerKV) -> bool:
        # With fixed splits one compiled kernel for every batch: two may round differently.
        always = self._division.fixed_split > 0 and kv.k_rows.dtype == kv.k_pages.dtype
        return tables.capacity.items or always

    def merge(self, tables: DeviceTables, partial: AttentionState, target: AttentionState) -> None:
        columns, rows = tables.capacity.columns, tables.capacity.rows
        lists = (tables.rows, tables.merge_count, tables.merge)
        variant = self.merge_variant(rows, columns)
        self._launch_merge(lists, variant, partial, target, roomy=tables.roomy)

    def merge_variants(self) -> dict[MergeVariant, int]:
        """All that merges of plans are compiled for, and a number of columns of each."""
        many = 1 + FEW_MERGES // self._shape.query_heads
        widest = MOST_AT_ONCE + COLUMN_STEP
        widths = (FEWEST_COLUMNS, *range(COLUMN_STEP, widest + 1, COLUMN_STEP))
        return {
            self.merge_variant(rows, columns): columns
            for rows, columns in product((1, many), widths)
        }

    def compile_merges(self, partial: AttentionState, target: AttentionState) -> None:
        """Launch each merge of eager plans once, on a row that it leaves as it is.

        partial: [kv_heads, 1, head_dim], [kv_heads, 1]; target: [1, query_heads, head_dim],
        [1, query_heads].
        """
        for variant, columns in self.merge_variants().items():
            none = torch.full((1, columns), -1, dtype=torch.int32, device=target.out.device)
            row, count = none.new_zeros(1), none.new_full((1,), -1)
            self._launch_merge((row, count, none), variant, partial, target, roomy=False)

    def _launch_merge(
        self,
        lists: tuple[Tensor, Tensor, Tensor],  # rows [rows], counts [rows], [rows, columns]
        variant: MergeVariant,
        partial: AttentionState,
        target: AttentionState,
        *,
        roomy: bool,
    ) -> None:
        shape, (rows, columns) = self._shape, lists[2].shape
        KERNELS.merge_kernel[(shape.query_heads // variant.heads, rows)](
            partial.out,
            partial.lse,
            *lists,
            target.out,
            target.lse,
            columns,
            partial.lse.shape[1],
            HEADS=shape.query_heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            DIM_PAD=self._padded_dim,
            OWN_HEADS=variant.heads,
            BLOCK=variant.block,
            ONCE=variant.once,
            ROOMY=roomy,
            num_warps=1,
            **overlap(target.out.device),
        )

    def merge_variant(self, rows: int, columns: int) -> MergeVariant:
        heads, block = self._merge_block(rows, columns)
        once = columns <= block and not self._division.fixed_split
        return MergeVariant(heads=heads, block=block, once=once)

    def _merge_block(self, rows: int, columns: int) -> tuple[int, int]:
        """Heads of a program of the merge, and partial results that it loads at once (H200)."""
        if not self._division.parallel_reduction:
            return 1, 1
        if self._division.fixed_split:  # the same for any batch
            return 1, 8
        group = self._shape.group
        if columns <= FEWEST_COLUMNS and group <= 8:
            return group, columns
        if rows * self._shape.query_heads <= FEW_MERGES or group % 2:
            return 1, min(columns, MOST_AT_ONCE)
        return 2, 8
