"""How much memory a device has left, and how much of it the KV cache takes."""

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from stemserve.worker.config import ConfigError

log = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
CPU_KV_SHARE = 0.25
CPU_KV_BYTES = 4 << 30  # at most, where nobody asks for more
MEMINFO = Path("/proc/meminfo")
# (limit, current use) of control groups, version 2 and 1.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
# Only torch's allocator of a GPU has an error of its own: what those of a CPU, of the CUDA driver,
# of cuBLAS and of oneDNN say.
SHORTAGES = ("allocate memory", "out of memory", "ALLOC_FAILED", "could not create a primitive")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """Bytes that a KV cache may have."""

    default: int  # where nobody asks for a size
    most: int
    advice: str  # what to change where they do not suffice


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes of a GPU and who has them, before the KV cache is made."""

    total: int
    others: int  # libraries, their kernels, other processes
    weights: int  # and tables of the model
    activations: int  # the most that a step takes beside
    graphs: int  # kept free for CUDA graphs

    def kv_room(self, utilization: float, advice: str) -> KvRoom:
        taken = self.others + self.weights + self.activations + self.graphs
        left = max(0, int(self.total * utilization) - taken)
        return KvRoom(default=left, most=left, advice=f"{advice} ({self})")

    def report(self, *, kv: int, graphs: int) -> None:
        """`graphs`: what their tensors have taken."""
        log.info(
            "memory: %s; KV cache %.2f GiB; graphs took %.2f GiB", self, kv / GIB, graphs / GIB
        )
        if graphs > self.graphs:
            log.warning(
                "CUDA graphs took %.2f GiB, more than the %.2f GiB that were kept for them; a "
                "smaller --gpu-memory-utilization leaves more room",
                graphs / GIB,
                self.graphs / GIB,
            )

    def __str__(self) -> str:
        parts = ("weights", "largest step", "kept for graphs", "others", "total")
        sizes = (self.weights, self.activations, self.graphs, self.others, self.total)
        return ", ".join(
            f"{name} {size / GIB:.2f} GiB" for name, size in zip(parts, sizes, strict=True)
        )


def cpu_kv_room() -> KvRoom:
    free = free_bytes(torch.device("cpu"))
    return KvRoom(
        default=min(int(free * CPU_KV_SHARE), CPU_KV_BYTES),
        most=free,
        advice="pass a smaller --kv-pages or --kv-memory (of a worker alone: --kv-memory-bytes)",
    )


def kv_pages(
    pages: int | None,  # asked for
    total_bytes: int | None,  # or so many bytes; neither: what the room says
    page_bytes: int,
    room: KvRoom,
) -> int:
    """Raises ConfigError if they do not fit."""
    if pages is None:
        pages = (room.default if total_bytes is None else total_bytes) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"the KV cache has no room for one page of {page_bytes} bytes; {room.advice}"
        )
    if pages * page_bytes > room.most:
        raise ConfigError(
            f"not enough memory: {pages} KV pages need {pages * page_bytes / GIB:.2f} GiB and "
            f"{room.most / GIB:.2f} GiB are free; {room.advice}"
        )
    return pages


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there was no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SHORTAGES)


def give_back(*, uses_gpu: bool) -> None:
    """What allocators keep of freed memory, in pieces that are too small for what comes."""
    if uses_gpu:
        torch.cuda.empty_cache()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's own
        libc.malloc_trim(0)


def held_bytes(device: torch.device) -> int:
    """Of a GPU, by torch's allocator: other processes do not count."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """The limits of a container included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    groups = [_cgroup_free(limit, used) for limit, used in CGROUPS if limit.exists()]
    return min([_meminfo_available(), *(free for free in groups if free is not None)])


def _meminfo_available() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{MEMINFO} does not say what is available")


def _cgroup_free(limit: Path, used: Path) -> int | None:
    """None: no limit."""
    text = limit.read_text().strip()
    return None if text == "max" else max(0, int(text) - int(used.read_text()))
