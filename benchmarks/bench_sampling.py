"""Draws from logits on a GPU, beside FlashInfer's sampling and the floor.

    python benchmarks/bench_sampling.py [--rows 1 16 64 256] [--output FILE]

float32 logits of 151,936 tokens. A time is that of one call in a CUDA graph of calls on different
logits, all engines taking turns; the floor reads the logits once at 4.3 TB/s. Ours gives a token's
log-probability and what failed, too; FlashInfer's only the token. `sharp` logits are like those of
a trained model (a few likely tokens); of `broad` ones half of the vocabulary has 0.9 of the mass.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_clock import graph_of, replay_us
from kernel_facts import results_folder
from torch import Tensor

from stemserve.kernels.host_array import index_tensor
from stemserve.kernels.sampling.draw import draw_tokens
from stemserve.kernels.sampling.slot_tables import SLOT, SlotTables

Row = dict[str, Any]
Draw = Callable[[Tensor], object]

VOCAB = 151_936
ROWS = (1, 16, 64, 256)
ROUNDS = 3
BYTES_PER_US = 4.3e6
COLD_BYTES = 200 << 20  # of all logits, some L2 caches
MOST_SETS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


SETTINGS = (
    Setting(name="greedy", temperature=0.0),
    Setting(name="temperature", temperature=0.8),
    Setting(name="top_p 0.9", temperature=0.8, top_p=0.9),
    Setting(name="top_k 50, top_p 0.9", temperature=0.8, top_k=50, top_p=0.9),
    Setting(name="top_k 2000, top_p 0.9", temperature=0.8, top_k=2000, top_p=0.9),
)


def logits_of(rows: int, kind: str) -> Tensor:
    logits = torch.randn(rows, VOCAB, device="cuda")
    if kind == "sharp":
        logits *= 2.0
        likely = torch.randint(VOCAB, (rows, 40), device="cuda")
        logits.scatter_(1, likely, 6 + 3.0 * torch.rand(rows, 40, device="cuda").log().neg())
    return logits


def ours(rows: int, setting: Setting) -> Draw:
    tables = SlotTables(rows, torch.device("cuda"))
    params = np.zeros(rows, SLOT)
    params["temperature"], params["top_k"] = setting.temperature, setting.top_k
    params["top_p"], params["seed"] = setting.top_p, np.arange(rows)
    tables.admit(np.arange(rows), params)
    slots = index_tensor(np.arange(rows), tables.device)
    return lambda logits: draw_tokens(logits, tables, slots, slots)


def flashinfer(rows: int, setting: Setting) -> Draw:
    """The fewest of its calls that draw as the setting says."""
    calls: Any = import_module("flashinfer.sampling")
    temperature = torch.full((rows,), setting.temperature, device="cuda")
    if setting.temperature == 0:
        return lambda logits: logits.argmax(-1)
    if setting.top_k:
        return lambda logits: calls.top_k_top_p_sampling_from_probs(
            calls.softmax(logits, temperature), setting.top_k, setting.top_p
        )
    if setting.top_p < 1:
        return lambda logits: calls.top_p_sampling_from_probs(
            calls.softmax(logits, temperature), setting.top_p
        )
    return lambda logits: calls.sampling_from_probs(calls.softmax(logits, temperature))


def measured(rows: int, kind: str, setting: Setting) -> Row:
    size = 4 * rows * VOCAB
    count = max(2, min(MOST_SETS, math.ceil(COLD_BYTES / size)))
    sets = [logits_of(rows, kind) for _ in range(count)]
    engines = {"ours": ours(rows, setting), "flashinfer": flashinfer(rows, setting)}
    graphs = {
        name: graph_of([partial(call, logits) for logits in sets]) for name, call in engines.items()
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):  # in turns: the clock falls under the power cap
        for name, graph in graphs.items():
            times[name].append(replay_us(graph) / count)
    us, peer_us = (statistics.median(times[name]) for name in ("ours", "flashinfer"))
    floor_us = size / BYTES_PER_US
    return {
        "rows": rows,
        "logits": kind,
        "setting": setting.name,
        "us": round(us, 2),
        "flashinfer_us": round(peer_us, 2),
        "floor_us": round(floor_us, 2),
        "over_floor": round(us / floor_us, 2),
        "speedup": round(peer_us / us, 2),
    }


def line_of(row: Row) -> str:
    return (
        f"{row['rows']:4d} rows {row['logits']:6s} {row['setting']:22s} {row['us']:8.1f} us"
        f"  floor {row['floor_us']:6.1f} x{row['over_floor']:6.2f}"
        f"  flashinfer {row['flashinfer_us']:8.1f} x{row['speedup']:5.2f}"
    )


def sampling_rows(rows: Sequence[int]) -> list[Row]:
    found: list[Row] = []
    for count in rows:
        for kind in ("sharp", "broad"):
            for setting in SETTINGS:
                found.append(measured(count, kind, setting))
                print(line_of(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    with torch.inference_mode():
        rows = sampling_rows(options.rows)
    output = options.output or results_folder(torch.device("cuda", 0)) / "sampling.json"
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": "python benchmarks/bench_sampling.py",
        "vocab": VOCAB,
    }
    output.write_text(json.dumps(facts | {"sampling": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
