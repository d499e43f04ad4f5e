"""How much memory a device has left, and how much of it the KV cache takes."""

from pathlib import Path

import torch

from stemserve.worker.config import ConfigError

GIB = 1 << 30
GPU_KV_SHARE = 0.85  # of what the weights leave
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


def kv_pages(
    pages: int | None,  # asked for
    total_bytes: int | None,  # or so many bytes; neither: a share of what is free
    page_bytes: int,
    device: torch.device,
) -> int:
    """Raises ConfigError if they do not fit."""
    free = free_bytes(device)
    if pages is None and total_bytes is None:
        total_bytes = int(free * GPU_KV_SHARE)
        if device.type == "cpu":
            total_bytes = min(int(free * CPU_KV_SHARE), CPU_KV_BYTES)
    if pages is None:
        pages = (total_bytes or 0) // page_bytes
    if pages < 1:
        raise ConfigError(f"the KV cache has no room for one page of {page_bytes} bytes")
    if pages * page_bytes > free:
        raise ConfigError(
            f"not enough memory: {pages} KV pages need {pages * page_bytes / GIB:.1f} GiB and "
            f"{free / GIB:.1f} GiB are free; pass a smaller --kv-pages or --kv-memory-bytes"
        )
    return pages


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
