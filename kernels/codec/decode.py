"""Tree decode on a CUDA device: shared pages are read once by all rows below them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.hopper import TAKEN_UNASKED, HopperTree, hopper_takes
from stemserve.kernels.codec.host_tables import Capacity, HostTables, host_work
from stemserve.kernels.codec.launch import LOG2E, DecodeNumbers, TritonTree, launch_shape
from stemserve.kernels.codec.pairs import Pairing
from stemserve.kernels.codec.pieces import DEFAULT_COSTS, DEFAULT_DIVISION
from stemserve.kernels.codec.planner import Planner
from stemserve.kernels.codec.tables import DeviceTables
from stemserve.kernels.codec.tiles import PAGE_SIZES, TILE_ROWS
from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.strategy import Kernel, Phase, Work


@dataclass(kw_only=True)
class DecodePlan:
    """Device tables and partial results of one layout; every layer runs it."""

    tables: DeviceTables
    partial_out: Tensor  # [kv_heads, partial_rows, head_dim]
    partial_lse: Tensor  # [kv_heads, partial_rows]
    merges: bool
    on_hopper: bool  # by the kernel of codec_hopper.cu

    @property
    def partial(self) -> AttentionState:
        return AttentionState(self.partial_out, self.partial_lse)

    @property
    def work(self) -> Work:
        return host_work(self.tables.host)


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
        hopper: bool | None = None,  # the kernel of codec_hopper.cu; None: where it is measured
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
        plain = not (numbers.soft_cap or numbers.window or division.fixed_split or numbers.converts)
        wanted = (numbers.dtype, shape.head_dim) in TAKEN_UNASKED if hopper is None else hopper
        self._hopper = wanted and plain and hopper_takes(shape, numbers.dtype, device)

    @cached_property
    def hopper(self) -> HopperTree | None:
        """The faster kernel, compiled when the first plan is made."""
        if not self._hopper:
            return None
        return HopperTree.make(self.shape, self.numbers, self.device, self.bins)

    @cached_property
    def bins(self) -> int:
        """CTAs of one KV head."""
        if self._processors:
            return self._processors
        cuda: Any = torch.cuda  # partly untyped
        count: int = cuda.get_device_properties(self.device).multi_processor_count
        resident = launch_shape(self.shape, self.numbers).resident
        return max(1, count * resident // self.shape.kv_heads)

    @cached_property
    def triton(self) -> TritonTree:
        return TritonTree(self.shape, self.numbers, self.division, self.bins)

    def compile_ahead(self) -> None:
        """The kernels of all plans, but for what number formats of pages need."""
        if self.device.type == "cpu":
            return
        out = torch.empty(
            (1, self.shape.query_heads, self.shape.head_dim),
            dtype=self.numbers.dtype,
            device=self.device,
        )
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=self.device)
        self.triton.compile_merges(self.partial(1), AttentionState(out, lse))

    def refusal(self, layout: AttentionLayout) -> str | None:
        if self.phase is Phase.DECODE and (reason := decode_refusal(layout)):
            return reason
        if self.numbers.converts and layout.segment_is_item.any():
            return f"tree decode reads no items beside pages of {self.numbers.page_dtype}"
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
            costs=self._costs,
            division=self.division,
            pairing=Pairing() if self.hopper is not None else None,
        )

    def work(self, layout: AttentionLayout) -> Work:
        return host_work(self.planner.plan(layout))

    def plan(self, layout: AttentionLayout) -> DecodePlan:
        host = self.planner.take(layout)
        tables = DeviceTables.make(host, self.device)
        partial = self.partial(tables.capacity.partial_rows)
        return DecodePlan(
            tables=tables,
            partial_out=partial.out,
            partial_lse=partial.lse,
            merges=host.merges,
            on_hopper=host.paired,
        )

    def plan_at(
        self,
        buffer: Tensor,  # [table_size] int32, which somebody else fills
        capacity: Capacity,
        partial: AttentionState,  # of `partial`, for at least the capacity's partial rows
        host: HostTables,  # of any layout
        *,
        paired: bool,
    ) -> DecodePlan:
        """Serves all plans of this planner that the capacity holds and that are `paired`, or not:
        these are for the kernel of codec_hopper.cu."""
        return DecodePlan(
            tables=DeviceTables.at(buffer, capacity, host, roomy=True),
            partial_out=partial.out,
            partial_lse=partial.lse,
            merges=True,
            on_hopper=paired,
        )

    def partial(self, rows: int) -> AttentionState:
        """Memory for partial results."""
        size = (self.shape.kv_heads, max(1, rows))
        half = self.numbers.dtype == torch.float16
        return AttentionState(
            torch.empty(
                (*size, self.shape.head_dim),
                dtype=torch.float16 if half else torch.float32,
                device=self.device,
            ),
            torch.empty(size, dtype=torch.float32, device=self.device),
        )

    def roomy_capacity(self, rows: int, pages: int) -> Capacity:
        """Room for about any layout of so many rows, with so many pages in its streams."""
        tiles = -(-rows // max(1, TILE_ROWS // self.shape.group * 3 // 4))
        pieces = 2 * (self.bins + tiles)
        return Capacity(
            rows=rows,
            records=self.bins + pieces,
            pages=-(-pages // 64) * 64,
            columns=-(-(self.bins + 8) // 8) * 8,
            partial_rows=pieces * TILE_ROWS,
            windowed=False,
            items=False,
        )

    def replan(self, plan: DecodePlan, layout: AttentionLayout) -> bool:
        """Put another layout into the plan's buffers; False if it needs a plan of its own."""
        host = self.planner.take(layout)
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

    def run_at(self, plan: DecodePlan, q: Tensor, kv: LayerKV, out: Tensor) -> None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.run_into(plan, q, kv, AttentionState(out[: len(q)], lse))

    def run_into(self, plan: DecodePlan, q: Tensor, kv: LayerKV, target: AttentionState) -> None:
        if plan.tables.capacity.rows == 0:
            return
        if q.stride()[1:] != (self.shape.head_dim, 1):
            raise ValueError(f"the heads of a row of q must lie side by side; strides {q.stride()}")
        if plan.tables.capacity.items:
            self._check_own_rows(kv)
        if plan.on_hopper and self.hopper and self.hopper.takes(plan.tables, q, kv):
            merges = plan.merges
            self.hopper.read_tree(plan.tables, plan.partial, q, kv, target, merges=merges)
        else:
            self.triton.read_tree(plan.tables, plan.partial, q, kv, target)
        if plan.merges:
            self.triton.merge(plan.tables, plan.partial, target)

    def _check_own_rows(self, kv: LayerKV) -> None:
        for rows in (kv.k_rows, kv.v_rows):
            if rows.dtype != kv.k_pages.dtype:
                raise ValueError(
                    f"own rows are {rows.dtype} and pages {kv.k_pages.dtype}; run items as stored"
                    " segments where the pages have another dtype"
                )
            if rows.stride()[1:] != (self.shape.head_dim, 1):
                raise ValueError(f"heads of own rows must lie side by side; {rows.stride()}")


__all__ = [
    "LOG2E",
    "PAGE_SIZES",
    "CodecDecode",
    "DecodeNumbers",
    "DecodePlan",
    "host_work",
]
