"""Tree decode by the kernel of codec_hopper.cu: what it takes, and its launch."""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.launch import LOG2E, DecodeNumbers
from stemserve.kernels.codec.pieces import RECORD
from stemserve.kernels.codec.tables import DeviceTables
from stemserve.kernels.codec.tiles import MASKED, PAGE_BITS, TILE_ROWS
from stemserve.kernels.cuda_program import CudaError, CudaKernel, TensorMap
from stemserve.kernels.layout import HeadShape

log = logging.getLogger(__name__)

FILES = (
    "hopper.cuh",
    "codec_hopper_weights.cuh",
    "codec_hopper_pages.cuh",
    "codec_hopper_walk.cuh",
    "codec_hopper_results.cuh",
    "codec_hopper.cu",
)
CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
# (dtype, head_dim) that use this kernel by default: float16 was timed, bfloat16 only tested.
TAKEN_UNASKED = ((torch.float16, 128), (torch.bfloat16, 128))
PAGE = 16
THREADS = 384
KEPT_MAPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """Steps of keys and of values that each ring holds, of heads of 128; twice as many of 64."""

    keys: int
    values: int

    @property
    def shared_bytes(self) -> int:
        return 2 * (self.keys + self.values) * 64 * 128 * 2 + 1024  # two rings; alignment


# Where memory is the limit, less in flight is 1 to 10 % faster. Blocks that read whole tiles, of
# many short nodes, are 1 to 4 % faster with more (H200).
SHALLOW, DEEP = Rings(keys=2, values=3), Rings(keys=3, values=4)


def constants(head_dim: int, dtype: torch.dtype, rings: Rings) -> dict[str, int]:
    """What the sources take as macros."""
    return {
        "DIM": head_dim,
        "RING_KEYS": rings.keys,
        "RING_VALUES": rings.values,
        "BF16": int(dtype == torch.bfloat16),
        "RECORD": RECORD,
        "MASKED": MASKED,
        "PAGE_BITS": PAGE_BITS,
        "TILE_ROWS": TILE_ROWS,
    }


def hopper_takes(shape: HeadShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel can run."""
    cuda: Any = torch.cuda  # partly untyped
    return (
        device.type == "cuda"
        and cuda.get_device_capability(device) == CAPABILITY
        and dtype in DTYPES
        and shape.head_dim in HEAD_DIMS
    )


POINTERS = (
    *("q", "records", "words", "masks"),
    *("partial_out", "partial_lse", "out", "lse"),
)
INTEGERS = ("q_stride", "partial_rows", "record_size", "bins", "heads", "kv_heads")
FLOATS = ("scale", "v_scale")


class Arguments(ctypes.Structure):
    """Those of `tree_kernel` after the tensor maps."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in INTEGERS),
        *((name, ctypes.c_float) for name in FLOATS),
    ]


OFFSETS: list[int] = [getattr(Arguments, name).offset for name in POINTERS + INTEGERS + FLOATS]
Place = tuple[int, torch.Size, tuple[int, ...]]  # address, shape and strides


class Launchable(Protocol):
    """`CudaKernel`, or what runs its source elsewhere."""

    def tensor_map(self, tensor: Tensor, box: Sequence[int]) -> TensorMap: ...

    def launch(self, blocks: int, threads: int, addresses: Sequence[int]) -> None: ...


@cache
def tree_kernel(
    head_dim: int, dtype: torch.dtype, rings: Rings, device: torch.device
) -> CudaKernel:
    """Compiled once a process, in some seconds."""
    options = [
        "--gpu-architecture=sm_90a",
        *(f"-D{name}={value}" for name, value in constants(head_dim, dtype, rings).items()),
    ]
    return CudaKernel(FILES, "tree_kernel", options, rings.shared_bytes, device)


@dataclass(kw_only=True)
class HopperTree:
    """The kernel for one shape of heads; two bins of a head share a block."""

    shape: HeadShape
    bins: int
    shallow: Launchable  # for plans whose pieces are merged
    deep: Launchable
    scales: tuple[float, float]  # of scores, to base 2; of values
    _maps: dict[Place, TensorMap] = field(default_factory=dict[Place, TensorMap])

    @classmethod
    def make(
        cls,
        shape: HeadShape,
        numbers: DecodeNumbers,
        device: torch.device,
        bins: int,
    ) -> "HopperTree | None":
        """None, with a warning, where the kernel cannot be compiled or loaded."""
        try:
            shallow, deep = (
                tree_kernel(shape.head_dim, numbers.dtype, rings, device)
                for rings in (SHALLOW, DEEP)
            )
        except CudaError as error:
            log.warning("tree decode runs without its Hopper kernel, slower: %s", error)
            return None
        scales = (shape.scale * numbers.k_scale * LOG2E, numbers.v_scale)
        return cls(shape=shape, bins=bins, shallow=shallow, deep=deep, scales=scales)

    def takes(self, tables: DeviceTables, q: Tensor, kv: LayerKV) -> bool:
        """Items, and pages of another format or size, are left to the Triton kernel."""
        pages = (kv.k_pages, kv.v_pages)
        alike = all(p.dtype == q.dtype and p.shape[1] == PAGE for p in pages)
        return alike and not tables.capacity.items

    def read_tree(
        self,
        tables: DeviceTables,
        partial: AttentionState,  # [kv_heads, partial_rows, head_dim], [kv_heads, partial_rows]
        q: Tensor,  # [rows, query_heads, head_dim]
        kv: LayerKV,
        target: AttentionState,  # [rows, query_heads, head_dim], [rows, query_heads]; written
        *,
        merges: bool,  # the plan's
    ) -> None:
        """Rows whose result is whole go to `target`, partial ones to `partial`."""
        if q.data_ptr() % 16 or q.stride(0) % 8:  # rows are read 16 bytes at a time
            q = q.contiguous()
        arguments = Arguments(
            *(q.data_ptr(), tables.records.data_ptr()),
            *(tables.words.data_ptr(), tables.masks.data_ptr()),
            *(partial.out.data_ptr(), partial.lse.data_ptr()),
            *(target.out.data_ptr(), target.lse.data_ptr()),
            *(q.stride(0), partial.lse.shape[1], tables.records.shape[1], self.bins),
            *(self.shape.query_heads, self.shape.kv_heads),
            *self.scales,
        )
        maps = [self._map(kv.k_pages), self._map(kv.v_pages)]
        base = ctypes.addressof(arguments)
        addresses = [ctypes.addressof(m) for m in maps] + [base + offset for offset in OFFSETS]
        kernel = self.shallow if merges else self.deep
        kernel.launch(block_count(self.bins, self.shape.kv_heads), THREADS, addresses)

    def _map(self, pages: Tensor) -> TensorMap:
        key = (pages.data_ptr(), pages.shape, pages.stride())
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= KEPT_MAPS:
                self._maps.clear()
            found = self._maps[key] = self.shallow.tensor_map(pages, (64, 1, PAGE, 1))
        return found


def block_count(bins: int, kv_heads: int) -> int:
    """Pairs of bins of a head; where their number is odd, the last ones of two heads are a pair."""
    return bins // 2 * kv_heads + bins % 2 * -(-kv_heads // 2)
