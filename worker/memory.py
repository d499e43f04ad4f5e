"""How much memory a device has left, the limits of a container included."""

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
# (limit, current use) of control groups, version 2 and 1.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes(device: torch.device) -> int:
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
