"""Tree decode on a CUDA device: shared pages are read once by all rows below them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels import codec_triton
from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec_division import Division, PieceCosts
from stemserve.kernels.codec_hopper import WIDE_TOKENS, HopperTree, hopper_takes
from stemserve.kernels.codec_pieces import DEFAULT_COSTS, DEFAULT_DIVISION
from stemserve.kernels.codec_planner import Planner
from stemserve.kernels.codec_tables import DeviceTables, HostTables
from stemserve.kernels.codec_tiles import STEP_TOKENS, TILE_ROWS
from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.strategy import Kernel, Part, Phase, Work

PAGE_SIZES = tuple(size for size in (8, 16, 32, 64) if size <= STEP_TOKENS)
LOG2E = 1 / math.log(2)
KERNELS: Any = codec_triton  # untyped: device code
# Whether decode takes the kernel of codec_hopper.cu where that can run. Its tests on the CPU pass,
# and on an H200 those of the version before the present one; see docs/log.md.
HOPPER = False


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How a head of some bytes is best read (H200)."""

    resident: int  # CTAs an SM
    stages: int  # steps in shared memory
    warps: int
    registers: int | None = None


NARROW = LaunchShape(resident=2, stages=3, warps=4)  # to 256 bytes a head
WIDE = LaunchShape(resident=1, stages=2, warps=8)  # to 512
WIDEST = LaunchShape(resident=1, stages=1, warps=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNumbers:
    """Number formats and what the model adds to plain attention."""

    dtype: torch.dtype  # of q and the result
    soft_cap: float = 0.0  # 0: none
    window: int = 0  # tokens that a row sees, itself included; 0: all
    k_scale: float = 1.0  # of FP8 pages
    v_scale: float = 1.0


@dataclass(kw_only=True)
class DecodePlan:
    """Device tables and partial results of one layout; every layer runs it."""

    tables: DeviceTables
    partial_out: Tensor  # [kv_heads, partial_rows, head_dim]
    partial_lse: Tensor  # [kv_heads, partial_rows]
    merges: bool
    arrivals: Tensor  # int64 [kv_heads], where the kernel itself merges

    @property
    def work(self) -> Work:
        return host_work(self.tables.host)


def host_work(host: HostTables) -> Work:
    pieces = host.pieces
    rows = pieces.high - pieces.low
    tree = Part(engine="tree", rows=rows, kv_tokens=pieces.tokens)
    if not host.merges:
        return Work(parts=(tree,))
    return Work(parts=(tree, Part(engine="merge", rows=rows, kv_tokens=np.zeros_like(rows))))


class CodecDecode:
    """One persistent kernel over equal pieces of the tiles' page streams, and a merge.

    As CoDec (arXiv 2505.17694) it reads each node once; the division into pieces is our own.
    A plan's launches depend on its capacities only, so a captured graph stays valid while `replan`
    or `grow` say so.
    """

    kernel = Kernel.CODEC

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        numbers: DecodeNumbers,
        processors: int = 0,  # CTAs that run at once on each KV head's share; 0 asks the device
        *,
        phase: Phase = Phase.DECODE,  # in PREFILL segments of any length and items pass too
        division: Division = DEFAULT_DIVISION,
        costs: PieceCosts = DEFAULT_COSTS,
        hopper: bool = HOPPER,
    ) -> None:
        if shape.scale <= 0 or numbers.k_scale <= 0:
            raise ValueError(
                "tree decode takes its maximum before scaling: scales must be positive"
            )
        if division.fixed_split and numbers.window:
            raise ValueError("tree decode has no fixed splits with a sliding window")
        self.shape = shape
        self.device = device
        self.numbers = numbers
        self.phase = phase
        self.division = division
        self._costs = costs
        self._processors = processors
        plain = not (numbers.soft_cap or numbers.window or division.fixed_split)
        self._hopper = hopper and plain and hopper_takes(shape, numbers.dtype, device)

    @cached_property
    def hopper(self) -> HopperTree | None:
        """The faster kernel, compiled when the first plan is made."""
        if not self._hopper:
            return None
        return HopperTree.make(self.shape, self.numbers.dtype, self.device, self.bins)

    @cached_property
    def bins(self) -> int:
        """CTAs of one KV head."""
        if self._processors:
            return self._processors
        cuda: Any = torch.cuda  # partly untyped
        count: int = cuda.get_device_properties(self.device).multi_processor_count
        return max(1, count * self.launch.resident // self.shape.kv_heads)

    @property
    def padded_dim(self) -> int:
        return max(16, _power_of_2(self.shape.head_dim))

    @property
    def launch(self) -> LaunchShape:
        head_bytes = self.padded_dim * self.numbers.dtype.itemsize
        return NARROW if head_bytes <= 256 else WIDE if head_bytes <= 512 else WIDEST

    def refusal(self, layout: AttentionLayout) -> str | None:
        if self.phase is Phase.DECODE and (reason := decode_refusal(layout)):
            return reason
        if layout.page_size not in PAGE_SIZES:
            return f"tree decode takes pages of {PAGE_SIZES} tokens, not {layout.page_size}"
        if self.shape.group > TILE_ROWS:
            return f"a group of {self.shape.group} heads exceeds a tile of {TILE_ROWS} rows"
        return None

    @cached_property
    def planner(self) -> Planner:
        return Planner(
            group=self.shape.group,
            bins=self.bins,
            window=self.numbers.window,
            costs=replace(self._costs, wide=WIDE_TOKENS) if self.hopper else self._costs,
            division=self.division,
            pairs=self.hopper is not None,
        )

    def work(self, layout: AttentionLayout) -> Work:
        return host_work(self.planner.plan(layout))

    def plan(self, layout: AttentionLayout) -> DecodePlan:
        host = self.planner.plan(layout)
        tables = DeviceTables.make(host, self.device)
        size = (self.shape.kv_heads, max(1, tables.capacity.partial_rows))
        half = self.numbers.dtype == torch.float16
        return DecodePlan(
            tables=tables,
            partial_out=torch.empty(
                (*size, self.shape.head_dim),
                dtype=torch.float16 if half else torch.float32,
                device=self.device,
            ),
            partial_lse=torch.empty(size, dtype=torch.float32, device=self.device),
            merges=host.merges,
            arrivals=torch.zeros(self.shape.kv_heads, dtype=torch.int64, device=self.device),
        )

    def replan(self, plan: DecodePlan, layout: AttentionLayout) -> bool:
        """Put another layout into the plan's buffers; False if it needs a plan of its own."""
        host = self.planner.plan(layout)
        if not plan.tables.capacity.holds(host.size) or (host.merges and not plan.merges):
            return False
        plan.tables.fill(host)
        return True

    def grow(self, plan: DecodePlan, layout: AttentionLayout) -> bool:
        """Take over the tokens that leaves gained in their last pages; False if more changed."""
        return plan.tables.grow(layout)

    def run(self, plan: DecodePlan, q: Tensor, kv: LayerKV) -> AttentionState:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.run_into(plan, q, kv, AttentionState(out, lse))
        return AttentionState(out, lse)

    def run_into(self, plan: DecodePlan, q: Tensor, kv: LayerKV, target: AttentionState) -> None:
        if plan.tables.capacity.rows == 0:
            return
        if q.stride()[1:] != (self.shape.head_dim, 1):
            raise ValueError(f"the heads of a row of q must lie side by side; strides {q.stride()}")
        if plan.tables.capacity.items:
            self._check_own_rows(kv)
        if self.hopper is not None and self.hopper.takes(plan.tables, q, kv):
            merged = self._read_on_hopper(self.hopper, plan, q, kv, target)
        else:
            merged = self._read_tree(plan, q, kv, target)
        if plan.merges and not merged:
            self._merge(plan, target)

    def _check_own_rows(self, kv: LayerKV) -> None:
        for rows in (kv.k_rows, kv.v_rows):
            if rows.dtype != kv.k_pages.dtype:
                raise ValueError(
                    f"own rows are {rows.dtype} and pages {kv.k_pages.dtype}; run items as stored"
                    " segments where the pages have another dtype"
                )
            if rows.stride()[1:] != (self.shape.head_dim, 1):
                raise ValueError(f"heads of own rows must lie side by side; {rows.stride()}")

    def _read_on_hopper(
        self, hopper: HopperTree, plan: DecodePlan, q: Tensor, kv: LayerKV, target: AttentionState
    ) -> bool:
        return hopper.read_tree(
            plan.tables,
            AttentionState(plan.partial_out, plan.partial_lse),
            plan.arrivals,
            q,
            kv,
            target,
            (self.shape.scale * self.numbers.k_scale * LOG2E, self.numbers.v_scale),
            plan.merges and self.division.parallel_reduction,
        )

    def _read_tree(self, plan: DecodePlan, q: Tensor, kv: LayerKV, target: AttentionState) -> bool:
        tables, numbers, shape = plan.tables, self.numbers, self.shape
        scale, cap_scale = shape.scale * numbers.k_scale * LOG2E, 0.0
        if numbers.soft_cap:
            scale, cap_scale = numbers.soft_cap * LOG2E, 2 * scale / numbers.soft_cap
        KERNELS.tree_kernel[(self.bins * shape.kv_heads,)](
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
            plan.partial_out,
            plan.partial_lse,
            target.out,
            target.lse,
            q.stride(0),
            kv.k_rows.stride(0),
            kv.v_rows.stride(0),
            plan.partial_lse.shape[1],
            scale,
            cap_scale,
            numbers.v_scale,
            HEADS=shape.query_heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            DIM_PAD=self.padded_dim,
            PAGE=kv.k_pages.shape[1],
            STAGES=self.launch.stages,
            SOFT_CAP=numbers.soft_cap > 0,
            WINDOW=numbers.window > 0,
            HAS_ITEMS=tables.capacity.items,
            WIDEN=numbers.dtype == torch.float32 or q.device.type == "cpu",
            num_warps=self.launch.warps,
            maxnreg=self.launch.registers,
        )
        return False

    def _merge_block(self, rows: int, columns: int) -> tuple[int, int]:
        """Heads of a program of the merge, and partial results that it loads at once (H200)."""
        if not self.division.parallel_reduction:
            return 1, 1
        if self.division.fixed_split:  # the same for any batch
            return 1, 8
        if columns <= 4 and self.shape.group <= 8:
            return self.shape.group, columns
        if rows * self.shape.query_heads <= 1024 or self.shape.group % 2:
            return 1, min(columns, 40)
        return 2, 8

    def _merge(self, plan: DecodePlan, target: AttentionState) -> None:
        tables, shape = plan.tables, self.shape
        columns, rows = tables.capacity.columns, tables.capacity.rows
        heads, block = self._merge_block(rows, columns)
        KERNELS.merge_kernel[(shape.query_heads // heads, rows)](
            plan.partial_out,
            plan.partial_lse,
            tables.rows,
            tables.merge_count,
            tables.merge,
            target.out,
            target.lse,
            columns,
            plan.partial_lse.shape[1],
            HEADS=shape.query_heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            DIM_PAD=self.padded_dim,
            OWN_HEADS=heads,
            BLOCK=block,
            num_warps=1,
        )
