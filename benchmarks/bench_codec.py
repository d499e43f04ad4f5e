"""Tree decode against its floor and its peers, on one GPU.

    python benchmarks/bench_codec.py [--peers] [--trees trees.json] [--out results.json]

Without --trees: the eleven trees of the first table. Each number is the median of CUDA-graph
replays, engines taking turns. `replay`: one call a graph, warm L2. `cold`: a call inside a graph
that walks over several KV sets, as a model's layers do. Every engine reads the same shared pages.
Peers: FlashInfer (paged decode; cascade, backend fa2), and with --fa3 FILE a FlashAttention 3.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from codec_engines import Engine, fa3_call, flashinfer_cascade, flashinfer_decode, own_call
from codec_summary import summary
from codec_timing import measure, plan_ms
from codec_trees import Case, case_of, table_trees

LEAST_FLOOR_US = 20  # shorter calls are mostly launches


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="FlashInfer's paged decode, cascade")
    parser.add_argument("--fa3", type=Path, help="library of a FlashAttention 3 build")
    parser.add_argument("--trees", type=Path, help="file of trees; those with floors of 20 us up")
    parser.add_argument("--apart", action="store_true", help="also without the merge")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def peers_of(options: argparse.Namespace) -> dict[str, Engine]:
    peers: dict[str, Engine] = {}
    if options.peers:
        peers |= {"fi_decode": flashinfer_decode, "fi_cascade_fa2": flashinfer_cascade}
    if options.fa3:
        ops: Any = torch.ops
        ops.load_library(str(options.fa3))
        peers["fa3"] = fa3_call
    return peers


def cases_of(trees_file: Path | None) -> list[Case]:
    if trees_file is None:
        return [case_of(name, nodes, (32, 8, 128)) for name, nodes in table_trees().items()]
    trees = json.loads(trees_file.read_text())
    cases = [case_of(name, tree["nodes"], tuple(tree["heads"])) for name, tree in trees.items()]
    return [case for case in cases if case.floor_us >= LEAST_FLOOR_US]


def line_of(case: Case, row: dict[str, Any], names: list[str]) -> str:
    shown = [
        f"{name} {row[name]['replay_us']:.1f}/{row[name]['cold_us']:.1f}"
        if "replay_us" in row[name]
        else f"{name} failed"
        for name in names
    ]
    own = row["codec"]
    replay, cold = (own.get(kind, math.nan) / case.floor_us for kind in ("replay_us", "cold_us"))
    return (
        f"{case.name[:44]:44s} floor {case.floor_us:6.1f} x{replay:.3f}/{cold:.3f}"
        f" err {own.get('error', math.nan):.1e} plan {row['plan_ms']:.2f} | " + ", ".join(shown)
    )


def main() -> None:
    options = parse_options()
    engines: dict[str, Engine] = {"codec": own_call}
    if options.apart:
        engines["no_merge"] = lambda case, q: own_call(case, q, merge=False)
    peers = peers_of(options)
    engines |= peers
    rows: list[dict[str, Any]] = []
    for case in cases_of(options.trees):
        rows.append(measure(case, engines, options.rounds) | {"plan_ms": plan_ms(case)})
        print(line_of(case, rows[-1], list(engines)), flush=True)
    result = summary(rows, list(peers), LEAST_FLOOR_US)
    print(json.dumps(result, indent=1))
    if options.out:
        header = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "command": " ".join(["python", "benchmarks/bench_codec.py", *sys.argv[1:]]),
        }
        options.out.write_text(json.dumps(header | {"summary": result, "trees": rows}, indent=1))


if __name__ == "__main__":
    main()
