"""What each part of tree decode's task division is worth, and what a fixed split costs."""

from typing import Any

import torch
from decode_engines import Call, CannotRun, Engine
from decode_section import measure
from kernel_summary import engine_us, geometric, rounded
from kernel_trees import Case

from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division

Row = dict[str, Any]

PARTS = {
    "tree only": Division(split=False, longest_first=False, parallel_reduction=False),
    "+ division": Division(longest_first=False, parallel_reduction=False),
    "+ longest first": Division(parallel_reduction=False),
    "+ parallel reduction": Division(),
}
FIXED_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
FIXED = {f"fixed {tokens}": Division(fixed_split=tokens) for tokens in FIXED_TOKENS}
FULL = "+ parallel reduction"
TREES = (
    "1 x 51200 + 16 x 512",
    "1 x 8192 + 64 x 256",
    "1 x 8192 + 128 x 2048",
    "4-ary, depth 3, 4096",
    "chain of 16 x 4096, a leaf of 256 each",
    "8 x (4096 + 8 x 256)",
    "no sharing, 32 x 8192",
)


def division_engine(name: str, division: Division) -> Engine:
    def prepare(case: Case, q: torch.Tensor) -> Call:
        codec = CodecDecode(case.shape, q.device, DecodeNumbers(dtype=q.dtype), division=division)
        refusal = codec.refusal(case.layout)
        if refusal is not None:
            raise CannotRun(refusal)
        plan = codec.plan(case.layout)
        return lambda kv: codec.run(plan, q, kv).out

    return Engine(name=name, prepare=prepare)


def division_rows(cases: list[Case], rounds: int) -> list[Row]:
    engines = [division_engine(name, division) for name, division in (PARTS | FIXED).items()]
    return [measure(case, engines, rounds) for case in cases if case.name in TREES]


def division_figures(rows: list[Row]) -> Row:
    """Geometric means over the trees; above 1: the full division is faster."""
    return {
        "division": _ratio(rows, "tree only", "+ division"),
        "longest_first": _ratio(rows, "+ division", "+ longest first"),
        "parallel_reduction": _ratio(rows, "+ longest first", FULL),
        "adaptive_vs_best_fixed": rounded(
            geometric(
                best / full
                for row in rows
                if (best := _best_fixed(row)) and (full := engine_us(row, FULL))
            )
        ),
        "fixed_split_cost": {name: _ratio(rows, name, FULL) for name in FIXED},
    }


def _ratio(rows: list[Row], slower: str, faster: str) -> float | None:
    return rounded(
        geometric(
            first / second
            for row in rows
            if (first := engine_us(row, slower)) and (second := engine_us(row, faster))
        )
    )


def _best_fixed(row: Row) -> float | None:
    times = [us for name in FIXED if (us := engine_us(row, name)) is not None]
    return min(times, default=None)
