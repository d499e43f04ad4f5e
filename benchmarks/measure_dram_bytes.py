"""Run tree decode and paged decode once each, for a profiler that counts DRAM bytes.

    ncu ... python benchmarks/measure_dram_bytes.py

Before every call the L2 cache is filled with other data, and a marker kernel tells the calls apart
in the profile. `dram_section.py` starts this and reads the counters.
"""

import json
from typing import Any

import torch
from decode_engines import Engine
from division_section import FULL, PARTS, division_engine
from kernel_trees import TREES_FILE, Case, file_cases, make_kv, repaged, table_cases

TREES = (
    "1 x 51200 + 16 x 512",
    "8 x (4096 + 8 x 256)",
    "chain of 16 x 4096, a leaf of 256 each",
    "codec/batch64_root120000",
)
FLUSH_BYTES = 256 << 20


def engines() -> list[Engine]:
    found = [division_engine("codec", PARTS[FULL])]
    try:
        from paged_peers import flashinfer_peers

        found += [peer for peer in flashinfer_peers() if peer.name == "fi_decode"]
    except ImportError:
        pass
    return found


def profiled(case: Case, engine: Engine, other: torch.Tensor) -> None:
    whole = repaged(case, pages) if (pages := engine.pages(case)) else None
    used = whole.case if whole else case
    kv = make_kv(used, torch.float16)
    q = torch.randn(
        (len(used.leaves), used.shape.query_heads, used.shape.head_dim), device="cuda"
    ).half()
    call = engine.prepare(used, q)
    call(kv)
    other.zero_()
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    cuda.profiler.start()
    cuda._sleep(1)  # the marker: its kernel is named spin_kernel
    call(kv)
    torch.cuda.synchronize()
    cuda.profiler.stop()


def main() -> None:
    other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    calls: list[dict[str, Any]] = []
    for case in [*table_cases(), *file_cases(TREES_FILE)]:
        if case.name in TREES:
            for engine in engines():
                profiled(case, engine, other)
                kv_bytes = 4 * case.tokens * case.shape.kv_heads * case.shape.head_dim
                calls.append({"tree": case.name, "engine": engine.name, "kv_bytes": kv_bytes})
    print("calls " + json.dumps(calls), flush=True)


if __name__ == "__main__":
    main()
