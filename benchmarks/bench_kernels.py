"""The kernels on a GPU, beside their floors and the best public ones.

    make bench-kernels ARGS="--fa3 FILE --fasttree-src DIR --codec-src DIR"

Sections: decode over the trees of the first table and of a file, prefill over shapes, planning on
the host, the parts of tree decode's division, and DRAM bytes by the GPU's counters. Tables go to
stdout, everything to kernels.json.
"""

import argparse
import gc
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch
from choices import Choices
from division_section import division_figures
from kernel_facts import facts, results_folder
from kernel_report import report
from kernel_summary import calibration, details, summary
from kernel_tables import Progress
from kernel_trees import TREES_FILE, Case, TreeFileError, file_cases, table_cases
from peers import PEERS, PeerOptions, find_peers
from plot_kernels import draw
from prefill_shapes import random_shapes, survey_grid
from sections import SECTIONS, TABLE_ONLY, Measured, RunPlan, run_tasks, tasks

from stemserve.kernels.strategy import Kernel

QUICK_TREES = (
    "codec/seq_leaf2048",
    "codec/batch16_root2048",
    "codec/batch64_root120000",
    "codec/depth6",
    "fasttree/1,4,16,512_1024,256,128,32",
    "fasttree/1,2,4,8,16,32,64,128,1024_16,16,16,16,16,16,16,16,16",
    "pat/8,16,32,256_512,512,256,32",
    "deft/fewshot_p20000_w50_g200",
    "hydragen/b1024_s2048_u256",
)
FULL_SHAPES, QUICK_SHAPES = 40, 10
FULL_ROUNDS, QUICK_ROUNDS = 3, 2
FULL_SECONDS, QUICK_SECONDS = 420, 95  # nothing starts later; what is left out is said


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer trees and shapes: 2 minutes")
    parser.add_argument(
        "--trees", type=Path, metavar="FILE", help="trees instead of data/trees.json"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION",
        help=f"some of {', '.join(SECTIONS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="of engines in turn, 3 or 2")
    parser.add_argument("--seconds", type=float, metavar="S", help="nothing starts later")
    parser.add_argument("--seed", type=int, help="of the random shapes; a fresh one by default")
    parser.add_argument("--shapes", type=int, metavar="N", help="random shapes of prefill")
    parser.add_argument("--fa3", type=Path, metavar="FILE", help="_vllm_fa3_C.abi3.so of vLLM")
    parser.add_argument("--fasttree-src", type=Path, metavar="DIR", help="checkout of FastTree")
    parser.add_argument("--codec-src", type=Path, metavar="DIR", help="built checkout of CoDec")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; compiles a minute")
    parser.add_argument(
        "--table-only", nargs="+", choices=PEERS, default=TABLE_ONLY, metavar="PEER",
        help=f"peers that the trees of the file do without ({', '.join(TABLE_ONLY)})",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of kernels.json")
    return parser.parse_args()


def tree_cases(options: argparse.Namespace) -> list[Case]:
    """A file that was asked for is measured whole."""
    if options.trees is not None:
        return file_cases(options.trees)
    cases = file_cases(TREES_FILE)
    return [case for case in cases if case.name in QUICK_TREES] if options.quick else cases


def run_plan(options: argparse.Namespace, seed: int) -> tuple[RunPlan, dict[str, str]]:
    peers, missing = find_peers(
        PeerOptions(
            fa3=options.fa3,
            fasttree=options.fasttree_src,
            codec=options.codec_src,
            flex=options.flex,
        )
    )
    count = options.shapes or (QUICK_SHAPES if options.quick else FULL_SHAPES)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS)
    plan = RunPlan(
        sections=options.only,
        table=table_cases(),
        trees=tree_cases(options),
        shapes=[*survey_grid(), *random_shapes(count, seed)],
        peers=peers,
        choices=Choices(device=torch.device("cuda", 0), dtype=torch.float16),
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else FULL_ROUNDS),
        table_only=options.table_only,
        deadline_s=time.perf_counter() + seconds,
    )
    return plan, missing


def result_of(plan: RunPlan, measured: Measured) -> dict[str, Any]:
    peers = [peer.name for peer in plan.peers]
    return {
        "summary": summary(
            table=measured.table,
            trees=measured.trees,
            peers=peers,
            shapes=measured.shapes,
            plans=measured.plans,
        ),
        "details": details(measured.table, measured.trees, peers),
        "calibration": calibration(measured.table, measured.trees, measured.shapes),
        "division_figures": division_figures(measured.division) if measured.division else None,
        "strategies": [str(kernel) for kernel in Kernel],
        "peers": peers,
        **vars(measured),
    }


def main() -> int:
    options = parse_options()
    if not torch.cuda.is_available():
        print("bench-kernels needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    started = time.perf_counter()
    seed = secrets.randbelow(1 << 31) if options.seed is None else int(options.seed)
    try:
        plan, missing = run_plan(options, seed)
    except TreeFileError as error:
        print(error, file=sys.stderr)
        return 2
    output = options.output or results_folder(plan.choices.device) / "kernels.json"
    known = facts(seed) | {"quick": options.quick}

    measured = Measured()

    def result() -> dict[str, Any]:
        seconds = round(time.perf_counter() - started, 1)
        notes = {"missing_peers": missing | without(plan), "seconds": seconds}
        return known | notes | result_of(plan, measured)

    gc.collect()
    gc.freeze()  # collections while measuring then look at what measuring made
    todo = tasks(plan, measured)
    progress = Progress(len(todo))
    with torch.inference_mode():
        run_tasks(todo, measured, plan.deadline_s, progress.step, lambda: write(output, result()))
    progress.close()
    found = result()
    print(report(found))
    print(f"\nseed {seed}; {found['seconds']:.0f} s; wrote {output}")
    print(*draw(found, output.parent), sep="\n")
    return 0


def without(plan: RunPlan) -> dict[str, str]:
    lacking = plan.choices.lacking
    return {"own strategies": f"torch's paths stood in: {lacking}"} if lacking else {}


def write(output: Path, result: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
