"""Launches the dense kernel: Q, K and V as TMA descriptors, and the kernel compiled once."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.dense import kernel_gluon
from stemserve.kernels.dense.tables import BLOCK_TOKENS, TILE_ROWS
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.raw_launch import CannotRecord, current_stream, record

log = logging.getLogger(__name__)

KERNELS: Any = kernel_gluon  # untyped: device code
LAYOUT: Any = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
LOG2E = 1.4426950408889634
STAGES = {64: 3, 128: 2}  # blocks of K, and of V, in shared memory, by head_dim
WARPS = 4  # of each consumer
REGISTERS = 168  # of a thread, before consumers take those of the producer
ALIGNMENT = 16  # bytes, of what TMA reads


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTiles:
    """See tables.py; every tensor starts at a multiple of `ALIGNMENT`."""

    items: Tensor  # [ctas, items, ITEM_FIELDS]
    blocks: Tensor  # [blocks * BLOCK_FIELDS]
    row_first: Tensor  # [rows]
    row_seen: Tensor  # [rows]


class Sources(NamedTuple):
    """What the kernel reads, each [rows or tokens, heads, head_dim]."""

    q: Tensor
    k_rows: Tensor
    v_rows: Tensor
    k_copies: Tensor
    v_copies: Tensor

    def matrices(self) -> "list[Matrix]":
        return [Matrix.of(source) for source in self]


class Matrix(NamedTuple):
    """As much of a descriptor as a compiled kernel's launcher reads."""

    base: Tensor  # [rows, heads, head_dim]
    shape: list[int]
    strides: list[int]
    padding: str
    round_f32_to_tf32: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """[rows, heads * head_dim]; rows may lie apart, as in a view of a projection."""
        rows, heads, dim = tensor.shape
        row_stride, head_stride, stride = tensor.stride()
        step = row_stride * tensor.element_size()
        if stride != 1 or head_stride != dim or (step | tensor.data_ptr()) % ALIGNMENT:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            row_stride = heads * dim
        return cls(tensor, [rows, heads * dim], [row_stride, 1], "zero")

    def descriptor(self, block_rows: int, head_dim: int) -> TensorDescriptor:
        return TensorDescriptor(
            self.base, self.shape, self.strides, [block_rows, head_dim], LAYOUT, self.padding
        )


class DenseLauncher:
    """Compiles at the first launch of a dtype; later ones skip what Triton checks each time."""

    def __init__(self, shape: HeadShape, device: torch.device) -> None:
        self._shape = shape
        cuda: Any = torch.cuda  # partly untyped
        self.processors: int = cuda.get_device_properties(device).multi_processor_count
        self._compiled: dict[torch.dtype, Any] = {}
        self._is_slow = False  # Triton launches in a way that is not known here
        self.fallbacks: Counter[str] = Counter()  # launches laid out anew, by reason

    def launch(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> None:
        """`matrices`: the sources, in their order."""
        arguments = self._arguments(tables, matrices, target)
        grid = (len(tables.items), 1, 1)
        compiled = self._compiled.get(target.out.dtype)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        rows = (TILE_ROWS // 2, *([BLOCK_TOKENS] * (len(matrices) - 1)))
        descriptors = [
            matrix.descriptor(block, self._shape.head_dim)
            for matrix, block in zip(matrices, rows, strict=True)
        ]
        self._compiled[target.out.dtype] = KERNELS.dense_kernel[grid](
            *descriptors, *arguments[len(descriptors) :], num_warps=WARPS, maxnreg=REGISTERS
        )

    def bound(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> Callable[[], None]:
        """`launch` of these, laid out once; whoever calls it keeps them.

        Where that cannot be, each launch is laid out anew, and counts as a fallback.
        """
        launch = partial(self.launch, tables, matrices, target)
        compiled = self._compiled.get(target.out.dtype)
        if compiled is None:  # once the first is launched
            return launch
        if self._is_slow:
            self.fallbacks["launcher"] += 1
            return launch
        try:
            arguments = self._arguments(tables, matrices, target)
            stream = current_stream(target.out)
            return record(compiled, len(tables.items), arguments, stream).bound()
        except CannotRecord as error:
            log.warning("attention is launched by Triton, which takes the host longer: %s", error)
            self._is_slow = True
            return launch

    def _arguments(
        self, tables: DeviceTiles, matrices: Sequence[Matrix], target: AttentionState
    ) -> tuple[Any, ...]:
        shape = self._shape
        return (
            *matrices,
            *(target.out, target.lse, tables.row_first, tables.row_seen),
            *(tables.items, tables.blocks, tables.items.shape[1], shape.scale * LOG2E),
            *(shape.query_heads, shape.kv_heads, shape.head_dim, STAGES[shape.head_dim]),
        )
